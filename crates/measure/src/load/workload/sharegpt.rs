//! Conversations in ShareGPT's form: the first question is the prompt, the first answer gives the
//! length of the answer.

use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use tokio::task::JoinSet;

use super::tokenizer::ServerTokenizer;
use super::{Ask, MAX_TOKENS, Prompt};
use crate::load::options::ShareGpt;
use crate::load::rng::Rng;
use crate::progress::Progress;

/// vLLM leaves out shorter ones, so that the same file gives the same kind of traffic.
const LEAST_TOKENS: usize = 4;
const MOST_PROMPT_TOKENS: usize = 1024;
const MOST_TOTAL_TOKENS: usize = 2048;

/// Estimate without a tokenizer.
const BYTES_PER_TOKEN: usize = 4;

/// Conversations measured at once: few, since servers limit the requests in flight of one client.
const BATCH: usize = 4;

#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    conversations: Turns,
}

/// The first two turns; the others are skipped.
#[derive(Default)]
struct Turns {
    first: Option<String>,
    second: Option<String>,
}

#[derive(Deserialize)]
struct Turn {
    #[serde(default)]
    value: String,
}

impl<'de> Deserialize<'de> for Turns {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Read;

        impl<'de> Visitor<'de> for Read {
            type Value = Turns;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list of turns")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut turns: A) -> std::result::Result<Turns, A::Error> {
                let first = turns.next_element::<Turn>()?.map(|turn| turn.value);
                let second = turns.next_element::<Turn>()?.map(|turn| turn.value);
                while turns.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Turns { first, second })
            }
        }

        deserializer.deserialize_seq(Read)
    }
}

/// A question and its recorded answer.
type Exchange = (String, String);

/// The requested number of conversations, in random order; if there are fewer, some occur again.
pub async fn sample(
    file: &ShareGpt,
    count: usize,
    seed: u64,
    tokenizer: Option<&Arc<ServerTokenizer>>,
    progress: &dyn Progress,
) -> Result<Vec<Ask>> {
    let ShareGpt { path, output_len } = file;
    if output_len.is_some_and(|len| !(1..=MAX_TOKENS).contains(&len)) {
        bail!("--sharegpt-output-len must be at least 1 and at most {MAX_TOKENS}");
    }
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let mut exchanges = read(BufReader::new(file)).with_context(|| path.display().to_string())?;
    let mut rng = Rng::new(seed);
    rng.shuffle(&mut exchanges);
    progress.begin("preparing", count);
    let mut asks = Vec::new();
    let mut rest = exchanges.into_iter();
    while asks.len() < count && rest.len() > 0 {
        let before = asks.len();
        for measured in measure(rest.by_ref().take(BATCH).collect(), tokenizer).await? {
            asks.extend(measured.ask(*output_len));
        }
        asks.truncate(count);
        progress.advance(asks.len() - before);
    }
    repeat(&mut asks, count, &mut rng).with_context(|| path.display().to_string())?;
    Ok(asks)
}

fn read(file: impl Read) -> Result<Vec<Exchange>> {
    let entries: Vec<Entry> = serde_json::from_reader(file)?;
    let exchanges = entries.into_iter().filter_map(|entry| {
        let Turns { first, second } = entry.conversations;
        Some((first?, second?))
    });
    Ok(exchanges.collect())
}

struct Measured {
    question: String,
    question_len: usize,
    answer_len: usize,
}

impl Measured {
    /// None if it is much shorter or longer than the others.
    fn ask(self, output_len: Option<usize>) -> Option<Ask> {
        let (prompt_len, wanted) = (self.question_len, output_len.unwrap_or(self.answer_len));
        let is_kept = prompt_len >= LEAST_TOKENS
            && (output_len.is_some() || wanted >= LEAST_TOKENS)
            && prompt_len <= MOST_PROMPT_TOKENS
            && prompt_len + wanted <= MOST_TOTAL_TOKENS;
        is_kept.then_some(Ask { prompt: Prompt::Text(self.question), prompt_len, output_len: wanted })
    }
}

/// Counts tokens, or estimates them from bytes. The order stays.
async fn measure(exchanges: Vec<Exchange>, tokenizer: Option<&Arc<ServerTokenizer>>) -> Result<Vec<Measured>> {
    let Some(tokenizer) = tokenizer else {
        let guess = |text: &str| text.len().div_ceil(BYTES_PER_TOKEN);
        let measured = exchanges.into_iter().map(|(question, answer)| Measured {
            question_len: guess(&question),
            answer_len: guess(&answer),
            question,
        });
        return Ok(measured.collect());
    };
    let mut tasks = JoinSet::new();
    for (number, (question, answer)) in exchanges.into_iter().enumerate() {
        let tokenizer = tokenizer.clone();
        tasks.spawn(async move {
            let question_len = tokenizer.encode(&question, true).await?.len();
            let answer_len = tokenizer.encode(&answer, true).await?.len();
            anyhow::Ok((number, Measured { question, question_len, answer_len }))
        });
    }
    let mut measured: Vec<_> = tasks.join_all().await.into_iter().collect::<Result<_>>()?;
    measured.sort_by_key(|(number, _)| *number);
    Ok(measured.into_iter().map(|(_, measured)| measured).collect())
}

fn repeat(asks: &mut Vec<Ask>, count: usize, rng: &mut Rng) -> Result<()> {
    let found = asks.len();
    if found == 0 {
        bail!(
            "no conversation of two turns whose prompt has {LEAST_TOKENS} to {MOST_PROMPT_TOKENS} tokens, and at most \
             {MOST_TOTAL_TOKENS} with its answer"
        );
    }
    while asks.len() < count {
        asks.push(asks[rng.below(found as u64) as usize].clone());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Unwatched;

    const FILE: &str = r#"[
        {"id": "a", "conversations": [
            {"from": "human", "value": "How do I borrow twice?"}, {"from": "gpt", "value": "Not mutably, at once."},
            {"from": "human", "value": 7}]},
        {"id": "one turn", "conversations": [{"from": "human", "value": "Hello?"}]},
        {"id": "none"},
        {"id": "short", "conversations": [{"value": "Hi"}, {"value": "Hello to you, too, my friend"}]},
        {"id": "b", "conversations": [{"value": "What is a lifetime?"}, {"value": "How long it lives"}]}
    ]"#;

    #[test]
    fn conversations_of_two_turns() {
        let exchanges = read(FILE.as_bytes()).expect("a dataset");
        let questions: Vec<&str> = exchanges.iter().map(|(question, _)| question.as_str()).collect();
        assert_eq!(questions, ["How do I borrow twice?", "Hi", "What is a lifetime?"]);
        assert!(read(b"{}".as_slice()).is_err());
        assert!(read(br#"[{"conversations": "no"}]"#.as_slice()).is_err());
    }

    #[test]
    fn lengths_decide_who_is_asked() {
        let check = |question_len, answer_len, output_len: Option<usize>, expect: Option<usize>| {
            let measured = Measured { question: String::new(), question_len, answer_len };
            assert_eq!(measured.ask(output_len).map(|ask| ask.output_len), expect, "{question_len} {answer_len}");
        };
        check(4, 4, None, Some(4));
        check(3, 4, None, None);
        check(4, 3, None, None);
        check(4, 3, Some(2), Some(2));
        check(1024, 1024, None, Some(1024));
        check(1024, 1025, None, None);
        check(1025, 4, None, None);
        check(1000, 4, Some(1049), None);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn too_few_come_again() {
        let path = std::env::temp_dir().join(format!("folio-sharegpt-{}.json", std::process::id()));
        std::fs::write(&path, FILE).expect("a temporary file");
        let asked = sample(&ShareGpt { path: path.clone(), output_len: None }, 7, 0, None, &Unwatched).await;
        std::fs::remove_file(&path).expect("the same file");
        let asks = asked.expect("two conversations");
        assert_eq!(asks.len(), 7);
        let kept = asks.iter().filter(|ask| ask.prompt == Prompt::Text("What is a lifetime?".into())).count();
        assert!((1..7).contains(&kept));
        assert!(repeat(&mut Vec::new(), 1, &mut Rng::new(0)).is_err());
    }
}
