//! Flags of speculative decoding: the drafting method, and the length of its drafts.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use folio_engine::speculate::NgramOptions;
use folio_session::Method;
use serde_json::Value;

/// The maximum number of nodes in a draft.
const MOST_TOKENS: usize = folio_engine::speculate::Draft::MOST_NODES;

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Speculative decoding")]
pub struct SpeculateArgs {
    /// Method of speculative decoding, which drafts several tokens and verifies them in one step;
    /// answers do not change. Methods: off, auto, ngram, suffix, lookahead, draft:MODEL,
    /// medusa:FILE or eagle:FILE; without MODEL or FILE, the one found beside the model
    #[arg(long, value_name = "METHOD", default_value = "off", env = "FOLIO_SPECULATE")]
    pub speculate: Method,
    /// Maximum number of draft tokens per step, all branches of a tree together [default: as many
    /// as the method can use]
    #[arg(long, value_name = "N", visible_alias = "num-speculative-tokens", value_parser = tokens)]
    pub speculate_tokens: Option<usize>,
    /// Always draft the maximum; by default the number adapts to acceptance and cost
    #[arg(long, requires = "speculate_tokens")]
    pub speculate_fixed: bool,
    /// Speculative decoding in vLLM's notation, e.g. {"method": "ngram", "num_speculative_tokens":
    /// 4}
    #[arg(long, value_name = "JSON", conflicts_with_all = ["speculate", "speculate_tokens"], hide_short_help = true)]
    pub speculative_config: Option<SpeculativeConfig>,
}

impl SpeculateArgs {
    /// Method and number of tokens, from either flag.
    pub fn wanted(&self) -> (Method, Option<usize>) {
        match &self.speculative_config {
            Some(config) => (config.method.clone(), config.tokens),
            None => (self.speculate.clone(), self.speculate_tokens),
        }
    }
}

fn tokens(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=MOST_TOKENS).contains(number));
    number.ok_or_else(|| format!("expected a number of tokens from 1 to {MOST_TOKENS}"))
}

/// The keys of vLLM's `--speculative-config` that Folio knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpeculativeConfig {
    method: Method,
    tokens: Option<usize>,
}

impl FromStr for SpeculativeConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| format!("expected a JSON object: {error}"))?;
        let object = value.as_object().ok_or("expected a JSON object")?;
        let mut config = Self { method: Method::Auto, tokens: None };
        let mut lookup = NgramOptions::default();
        let model = match object.get("model") {
            None | Some(Value::Null) => None,
            Some(Value::String(model)) => Some(model.clone()),
            Some(_) => return Err("model: expected a path or a name".into()),
        };
        for (key, value) in object {
            match (key.as_str(), value) {
                ("model", _) | (_, Value::Null) => {}
                ("method", Value::String(name)) => config.method = method(name, model.clone())?,
                ("prompt_lookup_min", value) => lookup.min = tokens(&value.to_string())?,
                ("prompt_lookup_max", value) => lookup.max = tokens(&value.to_string())?,
                ("num_speculative_tokens", value) => config.tokens = Some(tokens(&value.to_string())?),
                _ => return Err(format!("{key}: unknown key, or value {value} not supported")),
            }
        }
        match &mut config.method {
            Method::Auto if model.is_some() => config.method = Method::Draft(model),
            Method::Ngram(_) if lookup.min > lookup.max => {
                return Err(format!(
                    "prompt_lookup_min is {}, more than prompt_lookup_max, which is {}",
                    lookup.min, lookup.max
                ));
            }
            Method::Ngram(options) => *options = lookup,
            _ => {}
        }
        Ok(config)
    }
}

/// A method by vLLM's name.
fn method(name: &str, model: Option<String>) -> Result<Method, String> {
    let file = model.as_ref().map(PathBuf::from);
    match name {
        "draft_model" => Ok(Method::Draft(model)),
        "medusa" => Ok(Method::Medusa(file)),
        "eagle" | "eagle3" => Ok(Method::Eagle(file)),
        "ngram" | "suffix" => name.parse(),
        _ => Err(format!("method: expected ngram, suffix, draft_model, medusa, eagle or eagle3, found {name}")),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        speculate: SpeculateArgs,
    }

    fn parse(flags: &[&str]) -> Result<(Method, Option<usize>), String> {
        let line = Line::try_parse_from([&["folio"], flags].concat()).map_err(|error| error.to_string())?;
        Ok(line.speculate.wanted())
    }

    #[test]
    fn numbers_are_those_of_a_draft() {
        assert_eq!(parse(&[]), Ok((Method::Off, None)));
        let given = parse(&["--speculate", "suffix", "--speculate-tokens", "63"]);
        assert_eq!(given, Ok((Method::Suffix, Some(63))));
        for bad in ["0", "64", "-1", "few"] {
            let error = parse(&["--speculate", "ngram", &format!("--num-speculative-tokens={bad}")]).expect_err(bad);
            assert!(error.contains("from 1 to 63"), "{error}");
        }
        parse(&["--speculate", "ngram", "--speculate-fixed"]).expect_err("fixed at what?");
    }

    #[test]
    fn as_vllm_writes_it() {
        let check = |json: &str, method: Method, tokens: Option<usize>| {
            assert_eq!(parse(&["--speculative-config", json]), Ok((method, tokens)), "{json}");
        };
        let ngram = |min, max| Method::Ngram(NgramOptions { min, max });
        check(r#"{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}"#, ngram(2, 3), Some(4));
        check(r#"{"model": "x/y", "num_speculative_tokens": 3}"#, Method::Draft(Some("x/y".into())), Some(3));
        check(r#"{"model": "h", "method": "eagle3"}"#, Method::Eagle(Some("h".into())), None);
        check("{}", Method::Auto, None);
        for (bad, word) in [
            ("[]", "object"),
            (r#"{"method": "mlp_speculator"}"#, "mlp_speculator"),
            (r#"{"num_speculative_tokens": 99}"#, "from 1 to 63"),
            (r#"{"method": "ngram", "colour": 1}"#, "colour"),
            (r#"{"method": "ngram", "prompt_lookup_min": 5}"#, "prompt_lookup_max, which is 4"),
        ] {
            let error = parse(&["--speculative-config", bad]).expect_err(bad);
            assert!(error.contains(word), "{error}");
        }
        parse(&["--speculative-config", "{}", "--speculate", "ngram"]).expect_err("one of them");
    }
}
