//! A matrix as a picture: how far each form's predictions are from the base's, against its size.
//!
//! The SVG is written by hand and stands alone: its colours follow the reader's choice of light or
//! dark.

use std::fmt::Write;

use super::recipe::METHODS;
use super::report::{Figures, Matrix, Size};

const WIDTH: f64 = 820.0;
const HEIGHT: f64 = 500.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = WIDTH - 20.0;
const TOP: f64 = 54.0;
const BOTTOM: f64 = HEIGHT - 52.0;

const STYLE: &str = "\
text{font:12px system-ui,sans-serif;fill:#1f2328}.title{font-size:14px;font-weight:600}.label{font-size:11px}\
.paper{fill:#fff}.line{stroke:#d1d9e0;stroke-width:1}.frame{fill:none;stroke:#818b98;stroke-width:1}\
.m0{fill:#57606a}.m1{fill:#0969da}.m2{fill:#bc4c00}.m3{fill:#8250df}\
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.paper{fill:#0d1117}.line{stroke:#30363d}.frame{stroke:#7d8590}\
.m0{fill:#9198a1}.m1{fill:#58a6ff}.m2{fill:#f0883e}.m3{fill:#bc8cff}}";

struct Point {
    label: String,
    mark: usize,
    mib: f64,
    divergence: f64,
}

/// Rows without a place on a logarithmic scale are left out: the base itself, and failures.
fn points(matrix: &Matrix) -> Vec<Point> {
    let rows = matrix.weights.iter().filter_map(|row| match row.outcome {
        Ok(Figures { size: Size::Weights { disk_bytes, .. }, compared }) => {
            let method = row.method.as_deref().unwrap_or("");
            // A form without a method comes last.
            let mark = METHODS.iter().position(|known| *known == method).unwrap_or(METHODS.len());
            let mib = disk_bytes as f64 / (1u64 << 20) as f64;
            Some(Point { label: row.format.clone(), mark, mib, divergence: compared.divergence_mean })
        }
        _ => None,
    });
    rows.filter(|point| point.divergence.is_finite() && point.divergence > 0.0).collect()
}

impl Matrix {
    /// A plot of divergence over size, as an SVG file.
    pub fn svg(&self) -> String {
        svg(self)
    }
}

fn svg(matrix: &Matrix) -> String {
    let points = points(matrix);
    let axes = Axes::around(&points);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
         aria-label=\"divergence against size\">\n<style>{STYLE}</style>\n\
         <rect class=\"paper\" width=\"{WIDTH}\" height=\"{HEIGHT}\" rx=\"6\"/>\n"
    );
    let title = format!("{}: KL divergence from the unquantized model, {} tokens", matrix.model, matrix.tokens);
    text(&mut out, (LEFT, 24.0), "title", "start", &title);
    axes.draw(&mut out);
    legend(&mut out, &points);
    for point in &points {
        mark(&mut out, point.mark, axes.place(point));
    }
    labels(&mut out, &points, &axes);
    out.push_str("</svg>\n");
    out
}

/// From figures to places: size from left to right, the logarithm of the divergence upwards.
struct Axes {
    mib: (f64, f64),
    mib_step: f64,
    /// Powers of ten.
    decades: (i32, i32),
}

impl Axes {
    fn around(points: &[Point]) -> Self {
        let fold = |of: fn(&Point) -> f64| {
            let values = points.iter().map(of);
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)))
        };
        if points.is_empty() {
            return Self { mib: (0.0, 1.0), mib_step: 0.5, decades: (-4, 0) };
        }
        let (low, high) = fold(|point| point.mib);
        let mib_step = round_step((high - low).max(0.05 * high) / 6.0);
        // Half a step of air, so that no mark lies on the frame.
        let mib = (((low / mib_step - 0.5).floor() * mib_step).max(0.0), (high / mib_step + 0.5).ceil() * mib_step);
        let (low, high) = fold(|point| point.divergence.log10());
        Self { mib, mib_step, decades: ((low - 0.1).floor() as i32, (high + 0.1).ceil() as i32) }
    }

    fn x(&self, mib: f64) -> f64 {
        LEFT + (mib - self.mib.0) / (self.mib.1 - self.mib.0) * (RIGHT - LEFT)
    }

    fn y(&self, log10: f64) -> f64 {
        let (low, high) = (f64::from(self.decades.0), f64::from(self.decades.1));
        BOTTOM - (log10 - low) / (high - low) * (BOTTOM - TOP)
    }

    fn place(&self, point: &Point) -> (f64, f64) {
        (self.x(point.mib), self.y(point.divergence.log10()))
    }

    fn draw(&self, out: &mut String) {
        let steps = ((self.mib.1 - self.mib.0) / self.mib_step).round() as usize;
        for step in 0..=steps {
            let mib = self.mib.0 + step as f64 * self.mib_step;
            let x = self.x(mib);
            line(out, (x, TOP), (x, BOTTOM));
            text(out, (x, BOTTOM + 17.0), "", "middle", &format!("{}", (mib * 1000.0).round() / 1000.0));
        }
        for decade in self.decades.0..=self.decades.1 {
            let y = self.y(f64::from(decade));
            line(out, (LEFT, y), (RIGHT, y));
            text(out, (LEFT - 8.0, y + 4.0), "", "end", &format!("1e{decade}"));
        }
        let (width, height) = (RIGHT - LEFT, BOTTOM - TOP);
        push(
            out,
            format_args!("<rect class=\"frame\" x=\"{LEFT}\" y=\"{TOP}\" width=\"{width}\" height=\"{height}\"/>"),
        );
        text(out, ((LEFT + RIGHT) / 2.0, HEIGHT - 14.0), "", "middle", "weights on disk, MiB");
        let middle = (TOP + BOTTOM) / 2.0;
        push(
            out,
            format_args!(
                "<text x=\"18\" y=\"{middle}\" text-anchor=\"middle\" transform=\"rotate(-90 18 {middle})\">mean KL divergence, nats a token</text>"
            ),
        );
    }
}

/// 1, 2 or 5 times a power of ten, no smaller than asked.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|times| times * power).into_iter().find(|step| *step >= least).unwrap_or(power)
}

fn legend(out: &mut String, points: &[Point]) {
    let names = ["nearest", "gptq", "awq", "gguf"];
    let mut x = LEFT;
    for (number, name) in names.iter().enumerate().filter(|(number, _)| points.iter().any(|p| p.mark == *number)) {
        mark(out, number, (x + 6.0, 41.0));
        text(out, (x + 16.0, 45.0), "label", "start", name);
        x += 30.0 + 6.2 * name.len() as f64;
    }
}

/// A shape a method as well as a colour.
fn mark(out: &mut String, number: usize, (x, y): (f64, f64)) {
    let class = format!("class=\"m{number}\"");
    match number {
        0 => push(out, format_args!("<circle {class} cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4.5\"/>")),
        1 => push(
            out,
            format_args!("<rect {class} x=\"{:.1}\" y=\"{:.1}\" width=\"9\" height=\"9\"/>", x - 4.5, y - 4.5),
        ),
        2 => push(out, format_args!("<path {class} d=\"M{x:.1} {:.1}l5.5 9.5h-11z\"/>", y - 6.0)),
        _ => push(out, format_args!("<path {class} d=\"M{x:.1} {:.1}l5.5 5.5-5.5 5.5-5.5-5.5z\"/>", y - 5.5)),
    }
}

/// Left, top, right, bottom.
type Area = [f64; 4];

fn overlap(a: &Area, b: &Area) -> f64 {
    let width = a[2].min(b[2]) - a[0].max(b[0]);
    let height = a[3].min(b[3]) - a[1].max(b[1]);
    if width > 0.0 && height > 0.0 { width * height } else { 0.0 }
}

/// Each label goes beside its mark, where it hides the least of what is there.
fn labels(out: &mut String, points: &[Point], axes: &Axes) {
    const SIDES: [(f64, f64, &str); 8] = [
        (9.0, 4.0, "start"),
        (-9.0, 4.0, "end"),
        (0.0, -9.0, "middle"),
        (0.0, 17.0, "middle"),
        (8.0, -6.0, "start"),
        (8.0, 14.0, "start"),
        (-8.0, -6.0, "end"),
        (-8.0, 14.0, "end"),
    ];
    let mut taken: Vec<Area> =
        points.iter().map(|point| axes.place(point)).map(|(x, y)| [x - 6.0, y - 6.0, x + 6.0, y + 6.0]).collect();
    for point in points {
        let (x, y) = axes.place(point);
        let width = 6.1 * point.label.chars().count() as f64;
        let area = |&(dx, dy, anchor): &(f64, f64, &str)| {
            let left = x + dx
                - match anchor {
                    "start" => 0.0,
                    "end" => width,
                    _ => width / 2.0,
                };
            [left, y + dy - 9.0, left + width, y + dy + 2.0]
        };
        let hidden = |side: &(f64, f64, &str)| {
            let area = area(side);
            let outside =
                [LEFT - area[0], area[2] - RIGHT, TOP - area[1], area[3] - BOTTOM].map(|over| over.max(0.0) * 100.0);
            outside.iter().sum::<f64>() + taken.iter().map(|other| overlap(&area, other)).sum::<f64>()
        };
        let best = SIDES.iter().map(|side| (hidden(side), side)).min_by(|a, b| a.0.total_cmp(&b.0));
        let Some((_, side)) = best else { continue };
        taken.push(area(side));
        text(out, (x + side.0, y + side.1), "label", side.2, &point.label);
    }
}

fn line(out: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    push(out, format_args!("<line class=\"line\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>"));
}

fn text(out: &mut String, (x, y): (f64, f64), class: &str, anchor: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    push(
        out,
        format_args!("<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>"),
    );
}

fn push(out: &mut String, element: std::fmt::Arguments<'_>) {
    writeln!(out, "{element}").expect("a string takes everything");
}

#[cfg(test)]
mod tests {
    use super::super::report::Row;
    use super::super::report::tests::{figures, matrix};
    use super::*;

    /// Every tag is closed in order, every attribute quoted, every `&` an entity.
    fn well_formed(svg: &str) {
        let mut open = Vec::new();
        let mut rest = svg;
        while let Some(start) = rest.find('<') {
            assert!(!rest[..start].contains('>'), "a stray > before {}", &rest[..start.min(40)]);
            let end = start + rest[start..].find('>').expect("a tag ends");
            let tag = &rest[start + 1..end];
            rest = &rest[end + 1..];
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name), "{tag} closes what is open");
                continue;
            }
            let name = tag.split([' ', '/']).next().expect("a name");
            assert_eq!(tag.matches('"').count(), 2 * tag.matches('=').count(), "{tag}");
            if !tag.ends_with('/') {
                open.push(name);
            }
        }
        assert_eq!(open, Vec::<&str>::new());
        for (at, _) in svg.match_indices('&') {
            assert!(["&amp;", "&lt;", "&gt;"].iter().any(|entity| svg[at..].starts_with(entity)), "{}", &svg[at..]);
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn a_plot_is_well_formed_and_names_its_points() {
        let mut matrix = matrix();
        matrix.model = "a <b> & c".into();
        let svg = svg(&matrix);
        well_formed(&svg);
        assert!(svg.contains("a &lt;b&gt; &amp; c"), "{svg}");
        assert!(svg.contains(">int8</text>") && svg.contains(">int4-g128</text>"), "{svg}");
        assert!(!svg.contains(">bf16</text>"), "no divergence has no logarithm");
        assert!(svg.contains("prefers-color-scheme:dark"));
    }

    #[test]
    fn one_point_or_none_is_a_plot_too() {
        let mut matrix = matrix();
        matrix.weights.truncate(2);
        well_formed(&svg(&matrix));
        matrix.weights.clear();
        well_formed(&svg(&matrix));
    }

    #[test]
    fn marks_lie_inside_and_better_is_lower() {
        let mut matrix = matrix();
        let row = |bits, divergence| Row { format: "x".into(), method: None, outcome: Ok(figures(bits, divergence)) };
        matrix.weights = vec![row(4.0, 1.0), row(8.0, 1e-5), row(4.5, 0.01)];
        let points = points(&matrix);
        let axes = Axes::around(&points);
        let places: Vec<_> = points.iter().map(|point| axes.place(point)).collect();
        assert!(places.iter().all(|(x, y)| (LEFT..=RIGHT).contains(x) && (TOP..=BOTTOM).contains(y)), "{places:?}");
        assert!(places[0].1 < places[2].1 && places[2].1 < places[1].1, "{places:?}");
        assert!(places[0].0 < places[2].0 && places[2].0 < places[1].0, "{places:?}");
    }

    #[test]
    fn steps_are_round() {
        assert_eq!([0.7, 1.0, 3.0, 5.1, 42.0].map(round_step), [1.0, 1.0, 5.0, 10.0, 50.0]);
    }
}
