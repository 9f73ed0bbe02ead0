//! Folio's cost per token under growing work: more streams, longer contexts, larger models. Each
//! cost is shown with its lower bound, so that a term that grows too fast shows as a rising factor.

use super::plot::{self, Line, Point};
use super::question::{Engine, Question};
use super::record::Record;

/// One format for all, so that models differ by their size alone.
const FORMAT: &str = "q8_0";

pub struct Growth {
    pub name: &'static str,
    pub title: &'static str,
    axis: &'static str,
    lines: Vec<Line>,
}

pub fn all(records: &[Record]) -> [Growth; 3] {
    let of = |question| records.iter().filter(move |record| record.is_of(question) && record.format() == FORMAT);
    let by_case = |question: Question| {
        let sizes = || question.sizes().iter().map(|size| *size as f64).enumerate();
        let line = |record: &Record| Line {
            name: record.model().to_owned(),
            points: sizes().filter_map(|(case, x)| point(record, question, case, x)).collect(),
        };
        of(question).map(line).collect()
    };
    let by_size = |name: &str, question, case| {
        let mut points: Vec<Point> =
            of(question).filter_map(|record| point(record, question, case, record.parameters()?)).collect();
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        Line { name: name.to_owned(), points }
    };
    let sizes = [
        by_size("decode", Question::Decode, 0),
        by_size("behind 1,024 tokens", Question::Decode, 1),
        by_size("of 64 streams", Question::Streams, 6),
        by_size("of a prompt of 512", Question::Prefill, 1),
    ];
    [
        Growth {
            name: "cost-streams",
            title: "Cost of a token by streams that decode together, ms",
            axis: "streams",
            lines: by_case(Question::Streams),
        },
        Growth {
            name: "cost-context",
            title: "Cost of a decoded token by the context before it, ms",
            axis: "tokens of context",
            lines: by_case(Question::Context),
        },
        Growth {
            name: "cost-size",
            title: "Cost of a token by the size of the model, ms",
            axis: "parameters that a token meets",
            lines: sizes.into(),
        },
    ]
}

/// None if it was not measured.
fn point(record: &Record, question: Question, case: usize, x: f64) -> Option<Point> {
    let milliseconds = |rate: f64| 1e3 / rate;
    let y = milliseconds(record.best(Engine::Folio, question, case)?);
    Some(Point { x, y, least: record.bound(case).map(|(most, _)| milliseconds(most)) })
}

impl Growth {
    /// None without lines.
    pub fn svg(&self) -> Option<String> {
        let title = format!("{} ({FORMAT}; dotted: the least this machine allows)", self.title);
        plot::lines(&title, self.axis, &self.lines)
    }

    /// The factors of each cost over its lower bound, from left to right; empty without lines.
    pub fn caption(&self) -> String {
        let lines: Vec<String> = self.lines.iter().filter_map(factors).collect();
        if lines.is_empty() { String::new() } else { format!("Times the least: {}.\n\n", lines.join("; ")) }
    }
}

/// `42m 1.8, 3.3, 1.9`: the factor of each point of the line over its lower bound; none if no bound
/// is known.
fn factors(line: &Line) -> Option<String> {
    let factors = line.points.iter().filter_map(|point| Some(format!("{:.1}", point.y / point.least?)));
    let factors = factors.collect::<Vec<_>>().join(", ");
    (!factors.is_empty()).then(|| format!("{} {factors}", line.name))
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::record;
    use super::*;

    #[test]
    fn costs_stand_beside_the_least_they_could_be() {
        let mut records = Vec::new();
        for (model, parameters, rate) in [("3b", 3e9, 5.0), ("1b", 1e9, 20.0)] {
            let decode = record(Question::Decode, model, &[(Engine::Folio, &[rate, rate / 2.0])]);
            let bounds = [(2.0 * rate, "read"), (0.0, "read")];
            records.push(decode.described("here", None, &bounds, parameters));
            records.push(record(Question::Context, model, &[(Engine::Folio, &[rate, rate / 4.0])]));
        }
        let [streams, context, size] = all(&records);
        assert!(streams.svg().is_none() && context.svg().is_some() && size.svg().is_some());
        assert_eq!(size.caption(), "Times the least: decode 2.0, 2.0.\n\n");
        assert_eq!(context.caption(), "");
        let decode: Vec<_> = size.lines[0].points.iter().map(|point| (point.x, point.y, point.least)).collect();
        assert_eq!(decode, [(1e9, 50.0, Some(25.0)), (3e9, 200.0, Some(100.0))]);
        let context: Vec<_> = context.lines[1].points.iter().map(|point| (point.x, point.y, point.least)).collect();
        assert_eq!(context, [(0.0, 50.0, None), (512.0, 200.0, None)]);
    }
}
