//! Turns random tokens into text that the server reads as exactly the same number of tokens.
//!
//! Text made of tokens need not be read as the same ones. The tokens that the server reads are cut
//! or lengthened at the end and written again until the number is right; the beginning stays, so
//! that shared prefixes stay shared.

use std::sync::Arc;

use anyhow::{Context, Result};
use tokio::task::JoinSet;

use super::tokenizer::ServerTokenizer;
use super::{Alphabet, Ask, Prompt};
use crate::load::rng::Rng;
use crate::progress::Progress;

/// Prompts in progress at once: few, since servers limit the requests in flight of one client.
const BATCH: usize = 4;
/// After this number of attempts the count is accepted.
const ATTEMPTS: usize = 10;

pub async fn all(
    asks: &mut [Ask],
    tokenizer: &Arc<ServerTokenizer>,
    alphabet: &Alphabet,
    is_chat: bool,
    progress: &dyn Progress,
) -> Result<()> {
    // The tokens of a chat template are not counted in the prompt's own.
    let num_special = if is_chat { 0 } else { tokenizer.num_special };
    progress.begin("preparing", asks.len());
    for batch in asks.chunks_mut(BATCH) {
        let mut tasks = JoinSet::new();
        for (number, ask) in batch.iter().enumerate() {
            let Prompt::Drawn(segments) = &ask.prompt else { continue };
            let drawn = alphabet.tokens(segments);
            let own_len = ask.prompt_len.saturating_sub(num_special).max(1);
            let rng = Rng::new(segments.last().map_or(0, |segment| !segment.seed));
            let (tokenizer, alphabet) = (tokenizer.clone(), alphabet.clone());
            tasks.spawn(async move { anyhow::Ok((number, one(&tokenizer, &alphabet, drawn, own_len, rng).await?)) });
        }
        for fitted in tasks.join_all().await {
            let (number, (text, own_len)) = fitted.context("prompts could not be prepared")?;
            batch[number].prompt = Prompt::Text(text);
            batch[number].prompt_len = own_len + num_special;
        }
        progress.advance(batch.len());
    }
    Ok(())
}

/// The text, and its number of tokens on the server.
async fn one(
    tokenizer: &ServerTokenizer,
    alphabet: &Alphabet,
    mut tokens: Vec<u32>,
    wanted: usize,
    mut rng: Rng,
) -> Result<(String, usize)> {
    tokens.truncate(wanted);
    let mut attempt = 1;
    loop {
        let text = tokenizer.decode(&tokens).await?;
        tokens = tokenizer.encode(&text, false).await?;
        if tokens.len() == wanted || attempt == ATTEMPTS {
            return Ok((text, tokens.len()));
        }
        tokens.truncate(wanted);
        while tokens.len() < wanted {
            tokens.push(alphabet.pick(&mut rng));
        }
        attempt += 1;
    }
}
