//! Plots as SVG files of one or two KB: bars for engines side by side, lines for quantities that
//! grow. Axes are logarithmic, since engines and models differ by factors; colours follow the
//! reader's light or dark theme.

use super::question::{Engine, Question};
use super::record::Record;

const LEFT: f64 = 165.0;
const RIGHT: f64 = 620.0;
/// Below the title and the legend.
const TOP: f64 = 48.0;
const ROW: f64 = 20.0;

const STYLE: &str = "text{font:12px sans-serif;fill:#222}.p{fill:#fff}path{fill:none;stroke-width:2}.g{stroke:#8886;\
    stroke-width:1}.b{stroke-width:4;stroke-linecap:round}.e0{stroke:#27d}.e1{stroke:#d60}.e2{stroke:#95d}\
    .e3{stroke:#294}.d{stroke-dasharray:2 4}@media(prefers-color-scheme:dark){text{fill:#eee}.p{fill:#111}}";

/// A series: its costs, and their lower bounds.
pub struct Line {
    pub name: String,
    pub points: Vec<Point>,
}

pub struct Point {
    pub x: f64,
    pub y: f64,
    pub least: Option<f64>,
}

/// The answers to a question: a bar for each engine in each model's row, from one case to another.
/// None if there are no measurements, or the table suffices.
pub fn of(question: Question, records: &[&Record]) -> Option<String> {
    let (bars, ends): (&[(&str, usize, usize)], &str) = match question {
        Question::Decode => (&[("", 0, 1)], ": context 0 to 1,024"),
        Question::Prefill => (&[("", 0, 2)], ": 128 to 2,048 tokens"),
        Question::Streams => (&[("", 0, 6)], ": 1 to 64"),
        Question::Load => (&[(", first token", 0, 1), (", next ones", 2, 3)], ": p50 to p99"),
        Question::Start => (&[("", 0, 1)], ": file in memory, on disk"),
        Question::Memory => (&[("", 0, 0)], ""),
        Question::Http | Question::Context | Question::Kv => return None,
    };
    let row = |record: &Record, (name, from, to): (&str, usize, usize)| {
        let best = |engine, case| record.best(engine, question, case);
        let figures = Engine::ALL.map(|engine| Some([best(engine, from)?, best(engine, to)?]));
        (record.label() + name, figures)
    };
    let rows: Vec<_> = records.iter().flat_map(|record| bars.iter().map(|bar| row(record, *bar))).collect();
    let axis = Axis::over(rows.iter().flat_map(|(_, figures)| figures).flatten().flatten().copied(), LEFT, RIGHT)?;
    let bottom = TOP + ROW * rows.len() as f64;
    let mut drawing = Drawing::new(&format!("{}{ends}", question.title()));
    let ticks = axis.ticks();
    let grid: Vec<String> = ticks.iter().map(|tick| format!("M{:.0} {TOP}V{bottom}", axis.at(*tick))).collect();
    drawing.path("g", &grid.concat());
    drawing.texts("middle", ticks.iter().map(|tick| (axis.at(*tick), bottom + 15.0, tick.to_string())));
    let y = |row: usize| TOP + ROW * (row as f64 + 0.5);
    drawing.texts("start", rows.iter().enumerate().map(|(at, (label, _))| (8.0, y(at) + 4.0, label.clone())));
    let has_answered = |number: usize| rows.iter().any(|(_, figures)| figures[number].is_some());
    for (number, engine) in Engine::ALL.into_iter().enumerate().filter(|(number, _)| has_answered(*number)) {
        // One below the other, in the order of the legend: some readers see no colours.
        let bar = |at: usize| {
            let [from, to] = rows[at].1[number]?.map(|figure| axis.at(figure).round());
            Some(format!("M{from} {:.0}h{}", y(at) - 5.0 + 5.0 * number as f64, to - from))
        };
        let bars: String = (0..rows.len()).filter_map(bar).collect();
        let (x, y) = drawing.legend(engine.name());
        drawing.path(&format!("b e{number}"), &format!("M{x} {y}h0{bars}"));
    }
    Some(drawing.finish(bottom + 24.0))
}

/// A line for each series, and a dotted one for its lower bound: equal distances are equal factors.
pub fn lines(title: &str, axis_title: &str, lines: &[Line]) -> Option<String> {
    const BOTTOM: f64 = 250.0;
    let points = || lines.iter().flat_map(|line| &line.points);
    let least_x = points().map(|point| point.x).filter(|x| *x > 0.0).reduce(f64::min)?;
    // Zero has no logarithm: it is drawn at half of the least.
    let logarithmic = |x: f64| x.max(least_x / 2.0);
    let x_axis = Axis::over(points().map(|point| logarithmic(point.x)), 50.0, RIGHT)?;
    let y_axis = Axis::over(points().flat_map(|point| [Some(point.y), point.least]).flatten(), BOTTOM, TOP)?;
    let mut drawing = Drawing::new(title);
    let ticks = y_axis.ticks();
    let grid: Vec<String> = ticks.iter().map(|tick| format!("M50 {:.0}H{RIGHT}", y_axis.at(*tick))).collect();
    drawing.path("g", &grid.concat());
    drawing.texts("end", ticks.iter().map(|tick| (46.0, y_axis.at(*tick) + 4.0, tick.to_string())));
    let mut places: Vec<f64> = points().map(|point| point.x).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let labels = places.into_iter().map(|x| (x_axis.at(logarithmic(x)), BOTTOM + 16.0, count(x)));
    drawing.texts("middle", labels.chain([(335.0, BOTTOM + 33.0, axis_title.to_owned())]));
    for (number, line) in lines.iter().enumerate() {
        let (x, y) = drawing.legend(&line.name);
        let through = |figure: fn(&Point) -> Option<f64>| {
            let place = |point: &Point| Some((x_axis.at(logarithmic(point.x)), y_axis.at(figure(point)?)));
            let places = line.points.iter().filter_map(place).map(|(x, y)| format!("{x:.0} {y:.0}"));
            places.collect::<Vec<_>>().join("L")
        };
        drawing.path(&format!("e{number}"), &format!("M{} {y}h12M{}", x - 6.0, through(|point| Some(point.y))));
        drawing.path(&format!("e{number} d"), &format!("M{}", through(|point| point.least)));
    }
    Some(drawing.finish(BOTTOM + 40.0))
}

/// `64`, `42M`, `3.2B`
fn count(number: f64) -> String {
    match number {
        1e9.. => format!("{:.1}B", number / 1e9),
        1e6.. => format!("{:.0}M", number / 1e6),
        _ => number.to_string(),
    }
}

/// Maps figures to positions on the page.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn over(figures: impl Iterator<Item = f64> + Clone, from: f64, to: f64) -> Option<Self> {
        let figures = figures.filter(|figure| *figure > 0.0);
        let (low, high) = (figures.clone().reduce(f64::min)? / 1.1, figures.reduce(f64::max)? * 1.1);
        Some(Self { low, high, from, to })
    }

    fn at(&self, figure: f64) -> f64 {
        let share = (figure.max(self.low) / self.low).ln() / (self.high / self.low).ln();
        self.from + (self.to - self.from) * share
    }

    /// The multiples of powers of ten by 1, 2 and 5 in the range; only the powers if these are too
    /// many.
    fn ticks(&self) -> Vec<f64> {
        let steps = (-4..9).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| (digit, format!("{digit}e{power}"))));
        let steps = steps.map(|(digit, text)| (digit, text.parse::<f64>().expect("digits and a power")));
        let within: Vec<_> = steps.filter(|(_, tick)| (self.low..=self.high).contains(tick)).collect();
        let are_many = within.len() > 9;
        within.into_iter().filter(|(digit, _)| *digit == 1.0 || !are_many).map(|(_, tick)| tick).collect()
    }
}

struct Drawing {
    body: String,
    /// Position of the next name in the legend.
    legend_x: f64,
}

impl Drawing {
    fn new(title: &str) -> Self {
        Self { body: format!("<text x='8' y='18'>{title}</text>\n"), legend_x: 16.0 }
    }

    fn path(&mut self, class: &str, path: &str) {
        self.body += &format!("<path class='{class}' d='{path}'/>\n");
    }

    fn texts(&mut self, anchor: &str, texts: impl Iterator<Item = (f64, f64, String)>) {
        let texts: String = texts.map(|(x, y, text)| format!("<text x='{x:.0}' y='{y:.0}'>{text}</text>\n")).collect();
        self.body += &format!("<g text-anchor='{anchor}'>\n{texts}</g>\n");
    }

    /// Position of the mark for this name.
    fn legend(&mut self, name: &str) -> (f64, f64) {
        let x = self.legend_x;
        self.legend_x += 36.0 + 7.0 * name.chars().count() as f64;
        self.body += &format!("<text x='{}' y='38'>{name}</text>\n", x + 12.0);
        (x, 34.0)
    }

    fn finish(self, height: f64) -> String {
        format!(
            "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 640 {height}'>\n<style>{STYLE}</style>\n\
             <rect class='p' width='640' height='{height}'/>\n{}</svg>\n",
            self.body
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::record;
    use super::*;

    fn check(svg: &str) {
        assert!(svg.len() < 4096, "{}: {svg}", svg.len());
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn a_full_plot_is_small() {
        let rates = [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0];
        let rounds: Vec<(Engine, &[f64])> = Engine::ALL.iter().map(|engine| (*engine, &rates[..])).collect();
        for question in Question::ALL {
            let records: Vec<Record> = (0..14).map(|n| record(question, &format!("{}b", n / 4), &rounds)).collect();
            let svg = of(question, &records.iter().collect::<Vec<_>>());
            svg.iter().for_each(|svg| check(svg));
        }
        assert!(of(Question::Decode, &[]).is_none());
        let point = |n: i32| Point { x: f64::from(n * 512), y: f64::from(n + 7), least: Some(3.0) };
        let series = |number| Line { name: format!("line {number}"), points: (0..7).map(point).collect() };
        let svg = lines("cost", "context", &[0, 1, 2, 3].map(series)).unwrap();
        check(&svg);
        assert_eq!(svg.matches("class='e0").count(), 2, "{svg}");
        assert!(lines("cost", "context", &[]).is_none());
    }

    #[test]
    fn the_same_factor_is_the_same_distance() {
        let axis = Axis::over([12.0, 1100.0].into_iter(), 0.0, 100.0).unwrap();
        let [a, b, c] = [20.0, 40.0, 80.0].map(|figure| axis.at(figure));
        assert!((c - b - (b - a)).abs() < 1e-9 && a < b);
        assert_eq!(axis.ticks(), [20.0, 50.0, 100.0, 200.0, 500.0, 1000.0]);
        assert_eq!(Axis::over([0.02, 3000.0].into_iter(), 0.0, 1.0).unwrap().ticks(), [0.1, 1.0, 10.0, 100.0, 1000.0]);
        assert_eq!([0.0, 64.0, 42e6, 3.21e9].map(count), ["0", "64", "42M", "3.2B"]);
    }
}
