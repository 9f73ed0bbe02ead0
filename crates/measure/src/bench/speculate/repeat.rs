//! A file that is to be repeated with one edit: the two versions stand as in a merge conflict, the
//! second one begun. One name near the beginning is another in the second version, as it is
//! wherever else it occurs.

use anyhow::{Context, Result, ensure};
use folio_session::Session;

use super::super::streams::{self, Ask};
use super::{Options, Repeat, prompts, prompts::Prompt, runs_in_circles};

/// The share of a file that the prompt shows of its second version.
const BEGUN: f64 = 0.25;
/// The share that the model is given of a file that it writes.
const GIVEN: f64 = 0.3;
/// Letters of a name that may be edited: shorter ones are keywords, mostly.
const SHORTEST_NAME: usize = 6;
const NO_NAMES: [&str; 8] = ["unsafe", "static", "struct", "return", "extern", "derive", "assert", "option"];
/// Answers that do as asked for this part of their tokens repeat the file.
pub const REPEATS: f64 = 0.9;

/// Prompts for the pieces that make one: those in which there is a name to edit, and enough left to
/// be repeated.
pub fn read(args: &Options, session: &Session, kind: Repeat, streams: usize) -> Result<Vec<Prompt>> {
    let text = args.text.as_ref().context("--repeat needs --text")?;
    let tokenizer = session.assets.tokenizer.as_ref().context("--repeat needs a model with a tokenizer")?;
    let wanted = args.pairs.map_or(args.prompts, |pairs| pairs * streams);
    let pieces = prompts::pieces(args, session, text, wanted)?;
    let files = match kind {
        Repeat::Text => pieces,
        Repeat::Own => written(session, pieces)?,
    };
    let mut found = Vec::new();
    for file in files {
        // Whole lines, so that the second version begins as the first does.
        let text = tokenizer.decode(&file, true);
        let Some(Edited { prompt, rest }) = edited(whole_lines(&text), args.shown) else { continue };
        if tokenizer.encode(&rest, false)?.len() >= args.output_len {
            found.push(Prompt { tokens: tokenizer.encode(&prompt, false)?, expected: Some(rest) });
        }
    }
    ensure!(
        !found.is_empty(),
        "no file of --input-len {} tokens leaves {} to be repeated behind a name that can be edited",
        args.input_len,
        args.output_len
    );
    Ok(found)
}

/// Tokens that a prompt has at most.
pub fn longest(args: &Options) -> usize {
    // Names and markers take some more.
    (args.shown + 1) * (args.input_len + 32)
}

/// Files that the model writes behind the beginnings of pieces, greedily; those that run in circles
/// are no files.
fn written(session: &Session, pieces: Vec<Vec<u32>>) -> Result<Vec<Vec<u32>>> {
    let mut files = Vec::new();
    for piece in pieces {
        let given = &piece[..(piece.len() as f64 * GIVEN) as usize];
        let mut answers = streams::together(session, vec![Ask::new(given.to_vec(), piece.len() - given.len())])?;
        let answer = answers.pop().context("an answer")?.tokens;
        if !runs_in_circles(&answer) {
            files.push([given, &answer].concat());
        }
    }
    Ok(files)
}

/// How many tokens of an answer say what was asked for, before the first that does not.
pub fn followed(answer: &[u32], expected: &str, decode: impl Fn(&[u32]) -> String) -> usize {
    (0..=answer.len()).rev().find(|&len| expected.starts_with(&decode(&answer[..len]))).unwrap_or(0)
}

struct Edited {
    prompt: String,
    rest: String,
}

fn edited(file: &str, shown: usize) -> Option<Edited> {
    let begun = file[..floor(file, (file.len() as f64 * BEGUN) as usize)].rfind('\n')? + 1;
    let name = name_to_edit(file, begun)?;
    let other = format!("{name}2");
    let second = rename(file, name, &other);
    let begun = rename(&file[..begun], name, &other).len();
    let mut prompt = String::new();
    for _ in 0..shown {
        prompt += &format!("<<<<<<< HEAD\n{file}");
    }
    prompt += "=======\n";
    prompt += &second[..begun];
    Some(Edited { prompt, rest: second[begun..].to_owned() })
}

/// The longest name that occurs in the first `begun` bytes; one that does not come again, if there
/// is one.
fn name_to_edit(file: &str, begun: usize) -> Option<&str> {
    let names = file[..begun].split(|c: char| !is_of_name(c)).filter(|name| {
        name.len() >= SHORTEST_NAME && !name.starts_with(|c: char| c.is_ascii_digit()) && !NO_NAMES.contains(name)
    });
    names.max_by_key(|name| (!file[begun..].contains(name), name.len()))
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

fn rename(text: &str, name: &str, other: &str) -> String {
    let mut renamed = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(name) {
        let (before, found) = rest.split_at(at);
        let behind = &found[name.len()..];
        let is_whole = !before.ends_with(is_of_name) && !behind.starts_with(is_of_name);
        renamed += before;
        renamed += if is_whole { other } else { name };
        rest = behind;
    }
    renamed + rest
}

fn whole_lines(text: &str) -> &str {
    &text[..text.rfind('\n').map_or(text.len(), |end| end + 1)]
}

/// The last place up to `at` where a character begins.
fn floor(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str =
        "fn open_file() {\n    close();\n}\n\nfn close() {\n    first();\n    second();\n    third();\n}\n";

    #[test]
    fn the_second_version_has_one_edit_and_is_begun() {
        let Edited { prompt, rest } = edited(FILE, 1).expect("a name");
        assert_eq!(prompt, format!("<<<<<<< HEAD\n{FILE}=======\nfn open_file2() {{\n"));
        assert_eq!(rest, FILE["fn open_file() {\n".len()..]);
        let twice = edited(FILE, 2).expect("a name").prompt;
        assert_eq!(twice.matches("fn open_file()").count(), 2);
        assert!(edited("a\nb\nc\nd\n", 1).is_none(), "nothing to edit");
    }

    #[test]
    fn names_are_whole_and_renamed_everywhere() {
        assert_eq!(rename("abc abcd xabc abc.abc", "abc", "z"), "z abcd xabc z.z");
        assert_eq!(name_to_edit("let longest_name = longer_too; longest_name", 30), Some("longer_too"));
        assert_eq!(name_to_edit("let longest_name = longer_too;", 30), Some("longest_name"));
        assert_eq!(name_to_edit("fn a() {}", 9), None);
    }

    #[test]
    fn an_answer_follows_until_it_does_not() {
        let decode = |tokens: &[u32]| tokens.iter().map(|token| ["a", "bc", "b", "c"][*token as usize]).collect();
        assert_eq!(followed(&[0, 1, 0, 3], "abcabc", decode), 3);
        assert_eq!(followed(&[0, 2, 3], "abcabc", decode), 3, "by what it says, not by how it is cut into tokens");
        assert_eq!(followed(&[1], "", decode), 0);
    }
}
