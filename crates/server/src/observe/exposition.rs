//! Prometheus' text format, version 0.0.4: families of samples, written one after the other.

use std::fmt::Write;

/// Content type of the answer to a scraper.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A sample's value: counts stay exact.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    Count(u64),
    Real(f64),
}

impl From<u64> for Number {
    fn from(value: u64) -> Self {
        Self::Count(value)
    }
}

impl From<usize> for Number {
    fn from(value: usize) -> Self {
        Self::Count(value as u64)
    }
}

impl From<f64> for Number {
    fn from(value: f64) -> Self {
        Self::Real(value)
    }
}

impl std::fmt::Display for Number {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::Count(value) => write!(out, "{value}"),
            Self::Real(value) if value.is_nan() => out.write_str("NaN"),
            Self::Real(value) if value.is_infinite() => out.write_str(if value > 0.0 { "+Inf" } else { "-Inf" }),
            Self::Real(value) => write!(out, "{value}"),
        }
    }
}

/// The text as far as it is written. A family comes once, with all its samples behind it.
#[derive(Debug, Default)]
pub struct Exposition {
    text: String,
}

impl Exposition {
    pub fn into_text(self) -> String {
        self.text
    }

    /// Starts a family; a counter's name ends in `_total`.
    pub fn family(&mut self, name: &str, kind: Kind, help: &str) {
        debug_assert!(kind != Kind::Counter || name.ends_with("_total"), "counter {name} must end in _total");
        self.text.push_str("# HELP ");
        self.text.push_str(name);
        self.text.push(' ');
        escape(&mut self.text, help, false);
        let _ = writeln!(self.text, "\n# TYPE {name} {}", kind.name());
    }

    /// One sample; `labels` as [`labels`] writes them.
    pub fn sample(&mut self, name: &str, labels: &str, value: impl Into<Number>) {
        let value = value.into();
        // Writing to a string cannot fail.
        let _ = match labels {
            "" => writeln!(self.text, "{name} {value}"),
            labels => writeln!(self.text, "{name}{{{labels}}} {value}"),
        };
    }

    /// A family of one sample.
    pub fn single(&mut self, name: &str, kind: Kind, help: &str, labels: &str, value: impl Into<Number>) {
        self.family(name, kind, help);
        self.sample(name, labels, value);
    }

    /// The samples of one histogram: `counts` has one entry a bound, and one more for what lies
    /// above the last.
    pub fn histogram(&mut self, name: &str, labels: &str, bounds: &[f64], counts: &[u64], sum: impl Into<Number>) {
        debug_assert_eq!(bounds.len() + 1, counts.len(), "{name}: a count for each bound and one more");
        let comma = if labels.is_empty() { "" } else { "," };
        let mut total = 0;
        for (index, count) in counts.iter().enumerate() {
            total += count;
            let bound = bounds.get(index).copied().map_or_else(|| "+Inf".to_owned(), bound_text);
            let _ = writeln!(self.text, "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {total}");
        }
        self.sample(&format!("{name}_sum"), labels, sum);
        self.sample(&format!("{name}_count"), labels, total);
    }
}

/// Label pairs as they stand between braces.
pub fn labels(pairs: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (name, value) in pairs {
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(name);
        text.push_str("=\"");
        escape(&mut text, value, true);
        text.push('"');
    }
    text
}

fn escape(out: &mut String, text: &str, quotes: bool) {
    for char in text.chars() {
        match char {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '"' if quotes => out.push_str("\\\""),
            other => out.push(other),
        }
    }
}

/// A bucket's bound as Prometheus' own client for Python writes it: rules and dashboards may name
/// it literally.
fn bound_text(bound: f64) -> String {
    if bound < 1e6 {
        return format!("{bound:?}");
    }
    let exponential = format!("{bound:e}");
    match exponential.split_once('e') {
        Some((mantissa, exponent)) => format!("{mantissa}e+{exponent:0>2}"),
        None => exponential,
    }
}

#[cfg(test)]
pub mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Reads a text back, as strictly as a scraper: every sample under its family, no family or
    /// sample twice.
    pub fn parse(text: &str) -> BTreeMap<String, f64> {
        let (mut samples, mut families) = (BTreeMap::new(), BTreeMap::new());
        let mut helped = None;
        let mut family = (String::new(), String::new());
        assert!(text.ends_with('\n'), "the last line must end");
        for line in text.lines() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                helped = Some(help.split_once(' ').expect("help has a text").0.to_owned());
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').expect("a type");
                assert_eq!(helped.as_deref(), Some(name), "help comes before type");
                assert!(families.insert(name.to_owned(), kind.to_owned()).is_none(), "family {name} twice");
                family = (name.to_owned(), kind.to_owned());
            } else {
                let (series, value) = line.rsplit_once(' ').expect("a value");
                let name = series.split('{').next().expect("a name");
                assert!(name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_:".contains(&byte)), "{name}");
                match family.1.as_str() {
                    "histogram" => {
                        let suffix = name.strip_prefix(family.0.as_str()).expect("a sample under its family");
                        assert!(["_bucket", "_sum", "_count"].contains(&suffix), "{name}");
                    }
                    "counter" => assert!(name == family.0 && name.ends_with("_total"), "{name}"),
                    _ => assert_eq!(name, family.0),
                }
                let value = value.parse().unwrap_or_else(|_| panic!("{line}: not a number"));
                assert!(samples.insert(series.to_owned(), value).is_none(), "{series} twice");
            }
        }
        samples
    }

    #[test]
    fn labels_and_help_are_escaped() {
        assert_eq!(labels(&[("a", "x\"y\\z\nw"), ("b", "ü")]), "a=\"x\\\"y\\\\z\\nw\",b=\"ü\"");
        let mut out = Exposition::default();
        out.single("folio:x", Kind::Gauge, "two\nlines \\ and \"quotes\"", "", 1.5);
        let text = out.into_text();
        assert_eq!(text, "# HELP folio:x two\\nlines \\\\ and \"quotes\"\n# TYPE folio:x gauge\nfolio:x 1.5\n");
        assert_eq!(parse(&text)["folio:x"], 1.5);
    }

    #[test]
    fn bounds_are_written_as_scrapers_know_them() {
        let cases = [(0.001, "0.001"), (1.0, "1.0"), (2560.0, "2560.0"), (500_000.0, "500000.0"), (1e6, "1e+06")];
        for (bound, expected) in cases {
            assert_eq!(bound_text(bound), expected);
        }
        assert_eq!(bound_text(2.5e6), "2.5e+06");
        assert_eq!(Number::from(u64::MAX).to_string(), "18446744073709551615");
        assert_eq!(Number::from(f64::INFINITY).to_string(), "+Inf");
        assert_eq!(Number::from(f64::NAN).to_string(), "NaN");
    }

    #[test]
    fn buckets_count_everything_up_to_their_bound() {
        let mut out = Exposition::default();
        out.family("h", Kind::Histogram, "a histogram");
        out.histogram("h", "a=\"b\"", &[1.0, 5.0], &[2, 0, 3], 40u64);
        let samples = parse(&out.into_text());
        assert_eq!(samples["h_bucket{a=\"b\",le=\"1.0\"}"], 2.0);
        assert_eq!(samples["h_bucket{a=\"b\",le=\"5.0\"}"], 2.0);
        assert_eq!(samples["h_bucket{a=\"b\",le=\"+Inf\"}"], 5.0);
        assert_eq!((samples["h_sum{a=\"b\"}"], samples["h_count{a=\"b\"}"]), (40.0, 5.0));
    }
}
