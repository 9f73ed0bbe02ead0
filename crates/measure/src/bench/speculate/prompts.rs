//! Prompts: beginnings of text files, a file to be repeated with one edit, or tokens without a
//! pattern.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use folio_session::Session;

use super::super::streams;
use super::Options;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    pub tokens: Vec<u32>,
    /// The right answer, if it is known.
    pub expected: Option<String>,
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Self {
        Self { tokens, expected: None }
    }
}

/// As many prompts as were asked for, fewer where the text is too short for them.
pub fn read(args: &Options, session: &Session, streams: usize) -> Result<Vec<Prompt>> {
    let wanted = args.pairs.map_or(args.prompts, |pairs| pairs * streams);
    let Some(text) = &args.text else {
        let vocab = session.assets.model.spec.vocab_size;
        return Ok((0..wanted).map(|number| streams::prompt(vocab, args.input_len, number).into()).collect());
    };
    Ok(pieces(args, session, text, wanted)?.into_iter().map(Prompt::from).collect())
}

/// Pieces of `--input-len` tokens, spread over all of the text.
pub fn pieces(args: &Options, session: &Session, text: &Path, wanted: usize) -> Result<Vec<Vec<u32>>> {
    let tokenizer = session.assets.tokenizer.as_ref().context("--text needs a model with a tokenizer")?;
    let mut files = Vec::new();
    collect(text, &mut files).with_context(|| format!("--text {}", text.display()))?;
    files.sort();
    let mut pieces = Vec::new();
    for file in &files {
        // A file that is no text makes no prompt.
        let Ok(text) = std::fs::read_to_string(file) else { continue };
        let tokens = tokenizer.encode(&text, false)?;
        pieces.extend(tokens.chunks_exact(args.input_len).map(<[u32]>::to_vec));
    }
    ensure!(!pieces.is_empty(), "--text {} has no piece of {} tokens", text.display(), args.input_len);
    let take = wanted.min(pieces.len());
    let step = pieces.len() / take;
    Ok(pieces.into_iter().step_by(step).take(take).collect())
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
