//! Requests of a run: prompts and lengths, random or read from a file, ready to be sent.
//!
//! Random prompts are stored as seeds and written out when they are sent, so that a long trace
//! costs little memory. If the server can tokenize, they become text of exactly the requested
//! number of tokens, like the prompts of other load generators; otherwise they are sent as token
//! ids, or as plain words to a chat.

mod fit;
mod sharegpt;
mod synthetic;
mod tokenizer;
mod trace;

use std::borrow::Cow;
use std::sync::Arc;

use anyhow::{Result, bail};

use super::client::Client;
use super::options::{Dataset, Prompts};
use super::rng::Rng;
use crate::progress::Progress;
use tokenizer::ServerTokenizer;

/// Ids that every vocabulary has, for servers that do not report theirs.
const ASSUMED_VOCABULARY: u32 = 1000;

/// Longest prompt or answer that is accepted.
const MAX_TOKENS: usize = 10_000_000;

/// One request to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    pub prompt: Prompt,
    /// Expected length of the prompt; the report uses the server's count if it gives one.
    pub prompt_len: usize,
    pub output_len: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    /// Equal segments are equal tokens, so that prompts share the prefixes that their segments
    /// share.
    Drawn(Vec<Segment>),
}

/// A number of tokens that a seed determines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub seed: u64,
    pub len: usize,
}

/// Source of random prompts' tokens.
#[derive(Clone, Debug)]
pub enum Alphabet {
    /// Plain words, about a token each.
    Words,
    /// Token ids.
    Tokens(Vec<u32>),
    /// Token ids below this.
    Below(u32),
}

/// A prompt as it is sent.
#[derive(Debug, PartialEq, Eq)]
pub enum Rendered<'a> {
    Text(Cow<'a, str>),
    Tokens(Vec<u32>),
}

pub struct Workload {
    pub asks: Vec<Ask>,
    /// Recorded times of the requests in seconds; only for a trace.
    pub timestamps: Option<Vec<f64>>,
    pub alphabet: Alphabet,
}

impl Prompt {
    pub fn render(&self, alphabet: &Alphabet) -> Rendered<'_> {
        match (self, alphabet) {
            (Self::Text(text), _) => Rendered::Text(Cow::Borrowed(text)),
            (Self::Drawn(segments), Alphabet::Words) => {
                let words = segments.iter().flat_map(|segment| {
                    let mut rng = Rng::new(segment.seed);
                    (0..segment.len).map(move |_| tokenizer::word(&mut rng))
                });
                Rendered::Text(words.collect::<Vec<_>>().join(" ").into())
            }
            (Self::Drawn(segments), alphabet) => Rendered::Tokens(alphabet.tokens(segments)),
        }
    }
}

impl Alphabet {
    fn pick(&self, rng: &mut Rng) -> u32 {
        match self {
            Self::Words => panic!("words have no token ids"),
            Self::Tokens(tokens) => tokens[rng.below(tokens.len() as u64) as usize],
            Self::Below(size) => rng.below(u64::from(*size)) as u32,
        }
    }

    fn tokens(&self, segments: &[Segment]) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(segments.iter().map(|segment| segment.len).sum());
        for segment in segments {
            let mut rng = Rng::new(segment.seed);
            tokens.extend((0..segment.len).map(|_| self.pick(&mut rng)));
        }
        tokens
    }
}

/// Makes the requests of a run, with the server's tokenizer if it has one.
pub async fn prepare(
    prompts: &Prompts,
    client: &Arc<Client>,
    model: &str,
    is_chat: bool,
    progress: &dyn Progress,
) -> Result<Workload> {
    check(prompts)?;
    let tokenizer = ServerTokenizer::find(client, model).await?.map(Arc::new);
    let ids = match (prompts.vocab_size, &tokenizer) {
        (Some(size), _) => Alphabet::Below(size),
        (None, Some(tokenizer)) => Alphabet::Tokens(tokenizer.words.clone()),
        (None, None) => Alphabet::Below(ASSUMED_VOCABULARY),
    };
    let mut timestamps = None;
    let Prompts { count, seed, .. } = *prompts;
    let mut asks = match &prompts.dataset {
        Dataset::Random(lengths) => synthetic::random(lengths, count, seed)?,
        Dataset::PrefixRepetition(lengths) => synthetic::prefix_repetition(lengths, count, seed)?,
        Dataset::ShareGpt(file) => sharegpt::sample(file, count, seed, tokenizer.as_ref(), progress).await?,
        Dataset::Trace(file) => {
            let (asks, times) = trace::read(file, count, seed)?;
            timestamps = Some(times);
            asks
        }
    };
    // A trace may be too long to be written out at once.
    if let (Dataset::Random(_) | Dataset::PrefixRepetition(_), Some(tokenizer)) = (&prompts.dataset, &tokenizer)
        && tokenizer.decodes
    {
        fit::all(&mut asks, tokenizer, &ids, is_chat, progress).await?;
    }
    let alphabet = if is_chat { Alphabet::Words } else { ids };
    Ok(Workload { asks, timestamps, alphabet })
}

fn check(prompts: &Prompts) -> Result<()> {
    if prompts.count == 0 {
        bail!("--num-prompts is 0, but must be at least 1");
    }
    if prompts.vocab_size == Some(0) {
        bail!("--vocab-size is 0, but must be at least 1");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_segments_are_equal_tokens() {
        let prompt = |seeds: &[u64]| Prompt::Drawn(seeds.iter().map(|&seed| Segment { seed, len: 5 }).collect());
        let tokens = |prompt: &Prompt, alphabet: &Alphabet| match prompt.render(alphabet) {
            Rendered::Tokens(tokens) => tokens,
            Rendered::Text(text) => panic!("{text}"),
        };
        let below = Alphabet::Below(50_000);
        let (one, two) = (tokens(&prompt(&[1, 2]), &below), tokens(&prompt(&[1, 3]), &below));
        assert_eq!(one.len(), 10);
        assert_eq!(one[..5], two[..5]);
        assert_ne!(one[5..], two[5..]);
        assert!(tokens(&prompt(&[1]), &Alphabet::Tokens(vec![7, 9])).iter().all(|token| [7, 9].contains(token)));
        let words = prompt(&[1, 2]);
        let Rendered::Text(text) = words.render(&Alphabet::Words) else { panic!("words are text") };
        assert_eq!(text.split(' ').count(), 10);
    }
}
