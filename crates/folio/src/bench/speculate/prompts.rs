//! What the engines are asked: beginnings of text files, a file to be repeated with one edit, or tokens without a pattern.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::super::streams;
use crate::args::SpeculateBench;
use crate::session::Session;

/// As many prompts as were asked for, fewer where the text is too short for them.
pub fn read(args: &SpeculateBench, session: &Session) -> Result<Vec<Vec<u32>>> {
    let Some(text) = &args.text else {
        let vocab = session.assets.model.spec.vocab_size;
        return Ok((0..args.prompts).map(|number| streams::prompt(vocab, args.input_len, number)).collect());
    };
    let tokenizer = session.assets.tokenizer.as_ref().context("--text needs a model with a tokenizer")?;
    let mut files = Vec::new();
    collect(text, &mut files).with_context(|| format!("--text {}", text.display()))?;
    files.sort();
    let mut pieces = Vec::new();
    for file in &files {
        // What is no text is nobody's prompt.
        let Ok(text) = std::fs::read_to_string(file) else { continue };
        let tokens = tokenizer.encode(&text, false)?;
        let whole = tokens.chunks_exact(args.input_len);
        pieces.extend(whole.map(|piece| if args.repeat { repeated(piece) } else { piece.to_vec() }));
    }
    ensure!(!pieces.is_empty(), "--text {} has no piece of {} tokens", text.display(), args.input_len);
    // Spread over all of the text.
    let take = args.prompts.min(pieces.len());
    let step = pieces.len() / take;
    Ok(pieces.into_iter().step_by(step).take(take).collect())
}

/// A text, and its beginning again with one token left out: what follows is the rest of it.
fn repeated(piece: &[u32]) -> Vec<u32> {
    let (head, edit) = (piece.len() / 8, piece.len() / 16);
    piece.iter().chain(&piece[..edit]).chain(&piece[edit + 1..head.max(edit + 2)]).copied().collect()
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    for entry in std::fs::read_dir(path)? {
        collect(&entry?.path(), files)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_text_begins_again_with_one_edit() {
        let piece: Vec<u32> = (0..64).collect();
        let prompt = repeated(&piece);
        assert_eq!(prompt[..64], piece[..]);
        assert_eq!(prompt[64..], [0, 1, 2, 3, 5, 6, 7]);
    }
}
