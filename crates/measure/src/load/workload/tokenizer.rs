//! The server's own tokenizer, through `/tokenize` and `/detokenize` as in vLLM.

use std::sync::Arc;

use anyhow::{Result, bail};
use serde_json::{Value, json};

use crate::load::client::Client;
use crate::load::rng::Rng;

/// Short words that are one token in most vocabularies.
const WORDS: &str = "the of and to in is that for it with as was on be at by this have from or one had not but what \
                     all were when we there can an your which their said if do will each about how up out them then she \
                     many some so these would other into has more her two like him see time could no make than first \
                     been its who now people my made over did down only way find use may water long little very after \
                     words called just where most know get through back much before go good new write our used me man \
                     too any day same right look think also around another came come work three word must because does \
                     part even place well such here take why things help put years different away again off went old \
                     number great tell men say small every found still between name should home big give air line set \
                     own under read last never us left end along while might next sound below saw something thought both \
                     few those always show large often together asked house world going want school important until form \
                     food keep children feet land side without boy once animal life enough took four head above kind \
                     began almost live page got earth need far hand high year mother light country father let night \
                     picture being study second soon story since white ever paper hard near sentence better best across \
                     during today however sure knew try told young sun thing whole hear example heard several change \
                     answer room sea against top turned learn point city play toward five himself usually money seen car \
                     morning body upon family later turn move face door cut done group true half red fish plants";

pub struct ServerTokenizer {
    client: Arc<Client>,
    model: String,
    /// The tokens of common words, each once.
    pub words: Vec<u32>,
    /// Tokens that the server adds around a prompt's own.
    pub num_special: usize,
    /// Whether the server can turn tokens into text.
    pub decodes: bool,
}

/// One of the common words.
pub fn word(rng: &mut Rng) -> &'static str {
    static LIST: std::sync::OnceLock<Vec<&str>> = std::sync::OnceLock::new();
    let list = LIST.get_or_init(|| WORDS.split_whitespace().collect());
    list[rng.below(list.len() as u64) as usize]
}

impl ServerTokenizer {
    /// None if the server has no such routes; an error if no server answers.
    pub async fn find(client: &Arc<Client>, model: &str) -> Result<Option<Self>> {
        let client = client.clone();
        let mut found = Self { client, model: model.into(), words: Vec::new(), num_special: 0, decodes: false };
        // A token in the middle of a text usually begins with its space.
        let text = WORDS.split_whitespace().fold(String::new(), |text, word| text + " " + word);
        let (status, answer) = found.call("/tokenize", found.encoding(&text, false)).await?;
        let (200, Some(mut words)) = (status, tokens(&answer)) else { return Ok(None) };
        let Ok(whole) = found.encode(&text, true).await else { return Ok(None) };
        found.num_special = whole.len().saturating_sub(words.len());
        found.decodes = found.decode(&words).await.is_ok();
        words.sort_unstable();
        words.dedup();
        found.words = words;
        Ok(Some(found).filter(|found| !found.words.is_empty()))
    }

    pub async fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        let (status, answer) = self.call("/tokenize", self.encoding(text, add_special_tokens)).await?;
        match (status, tokens(&answer)) {
            (200, Some(tokens)) => Ok(tokens),
            _ => bail!("/tokenize answered {status} {}", brief(&answer)),
        }
    }

    pub async fn decode(&self, tokens: &[u32]) -> Result<String> {
        let (status, answer) = self.call("/detokenize", json!({"model": self.model, "tokens": tokens})).await?;
        match (status, answer.get("prompt").and_then(Value::as_str)) {
            (200, Some(text)) => Ok(text.into()),
            _ => bail!("/detokenize answered {status} {}", brief(&answer)),
        }
    }

    fn encoding(&self, text: &str, add_special_tokens: bool) -> Value {
        json!({"model": self.model, "prompt": text, "add_special_tokens": add_special_tokens})
    }

    async fn call(&self, path: &str, body: Value) -> Result<(u16, Value)> {
        self.client.json("POST", path, Some(&body)).await
    }
}

fn tokens(answer: &Value) -> Option<Vec<u32>> {
    let tokens = answer.get("tokens")?.as_array()?;
    tokens.iter().map(|token| token.as_u64().and_then(|token| u32::try_from(token).ok())).collect()
}

fn brief(answer: &Value) -> String {
    answer.to_string().chars().take(200).collect()
}
