//! Runs of lines that stand in the tree more than once, as a list of places to look: the same logic
//! can often be one function.

use std::collections::HashMap;
use std::fmt::{Display, Formatter};
use std::path::Path;

use anyhow::{Context, Result};

use crate::process;

/// Fewer lines than these alike are chance.
const LINES: usize = 6;
const ENDINGS: [&str; 4] = [".rs", ".cu", ".cuh", ".py"];

/// Lines that an earlier place has too.
#[derive(Debug, PartialEq)]
struct Run {
    /// Position in the list of files.
    file: usize,
    /// Numbers of its first and last line.
    lines: (usize, usize),
    /// The file and the first line of the earlier place.
    earlier: (usize, usize),
    /// How many lines count.
    len: usize,
}

/// A line that counts, with its number.
type Line<'a> = (usize, &'a str);

/// Prints the runs of the checkout in `root`, longest first.
pub fn list(root: &Path) -> Result<()> {
    let mut ls = process::command("git", &["ls-files", "-z"]);
    let names = process::output(ls.current_dir(root))?;
    let names: Vec<&str> = names.split('\0').filter(|name| ENDINGS.iter().any(|end| name.ends_with(end))).collect();
    let read = |name: &&str| std::fs::read_to_string(root.join(name)).with_context(|| (*name).to_owned());
    let texts: Vec<String> = names.iter().map(read).collect::<Result<_>>()?;
    let files: Vec<Vec<Line<'_>>> = texts.iter().map(|text| lines(text)).collect();
    let mut runs = runs(&files);
    runs.sort_by_key(|run| std::cmp::Reverse(run.len));
    for run in &runs {
        println!("{}", Shown(run, &names));
    }
    let total: usize = runs.iter().map(|run| run.len).sum();
    println!("{} repeated runs of {LINES} lines or more, {total} lines, in {} files", runs.len(), names.len());
    Ok(())
}

struct Shown<'a>(&'a Run, &'a [&'a str]);

impl Display for Shown<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let Self(Run { file, lines, earlier, len }, names) = self;
        write!(f, "{len:4} {}:{}-{} ~ {}:{}", names[*file], lines.0, lines.1, names[earlier.0], earlier.1)
    }
}

/// The lines that count: comments, imports, and lines without a word do not.
fn lines(text: &str) -> Vec<Line<'_>> {
    let counts = |line: &str| {
        let is_passed_over =
            ["//", "#", "use ", "pub use ", "import ", "from "].iter().any(|start| line.starts_with(start));
        !is_passed_over && line.contains(char::is_alphanumeric)
    };
    text.lines().map(str::trim).enumerate().filter(|(_, line)| counts(line)).map(|(at, line)| (at + 1, line)).collect()
}

/// Each maximal run once for each place but the first.
fn runs(files: &[Vec<Line<'_>>]) -> Vec<Run> {
    let mut first: HashMap<Vec<&str>, (usize, usize)> = HashMap::new();
    let mut runs = Vec::new();
    for (file, lines) in files.iter().enumerate() {
        let mut run: Option<Run> = None;
        for (at, window) in lines.windows(LINES).enumerate() {
            let key = window.iter().map(|(_, line)| *line).collect();
            let found = *first.entry(key).or_insert((file, at));
            let last = window[LINES - 1].0;
            match (&mut run, found == (file, at)) {
                (_, true) => runs.extend(run.take()),
                (Some(run), false) => (run.lines.1, run.len) = (last, run.len + 1),
                (None, false) => {
                    let earlier = (found.0, files[found.0][found.1].0);
                    run = Some(Run { file, lines: (window[0].0, last), earlier, len: LINES });
                }
            }
        }
        runs.extend(run);
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_in_and_across_files() {
        let part = "let a = 1;\n}\n// Why.\nlet b = 2;\n\nlet c = 3;\nlet d = 4;\nlet e = 5;\nlet f = 6;\n";
        let texts =
            [format!("use a;\n{part}g();\n"), format!("{part}h();\n{part}g();\n"), part.replace("e = 5", "e = 6")];
        let files: Vec<Vec<Line<'_>>> = texts.iter().map(|text| lines(text)).collect();
        let run = |lines, len| Run { file: 1, lines, earlier: (0, 2), len };
        assert_eq!(runs(&files), [run((1, 9), 6), run((11, 20), 7)]);
    }
}
