//! `folio run`: one answer, or a chat.

use std::hash::{BuildHasher, RandomState};
use std::io::Read;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use folio_engine::SamplingParams;
use folio_server::{Finish, SamplingDefaults, TextOptions, TextStream};
use folio_session::{Assets, Session};
use folio_terminal::{Signal, Signals};
use folio_text::Tokenizer;
use serde_json::{Value, json};

use crate::args::{RunArgs, SamplingArgs};
use crate::{chat, hooks};

/// Maximum number of sequences. A chat runs one request at a time, so it plans memory for few.
const CHAT_SEQS: usize = 4;

pub fn main(args: RunArgs) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run(args))
}

async fn run(args: RunArgs) -> Result<ExitCode> {
    let mut options = args.model.engine.options()?;
    let mut assets = Assets::open(args.model.model.as_deref(), &options)?;
    assets.set_generation(&args.sampling.generation.options())?;
    if let Some(note) = &assets.note {
        say!("note: {note}");
    }
    let Some(tokenizer) = assets.tokenizer.clone() else {
        bail!("{} has no tokenizer; `folio run` needs one: put tokenizer.json beside the weights", assets.name);
    };
    let is_chat = !args.raw && assets.template.is_some();
    options.max_num_seqs = Some(options.max_num_seqs.unwrap_or(CHAT_SEQS).min(CHAT_SEQS));
    let session = Session::start(assets, &options, hooks::hooks())?;
    let prompt = match args.prompt.as_deref() {
        Some("-") => Some(standard_input()?),
        prompt => prompt.map(str::to_string),
    };
    let signals = Signals::of(&[Signal::Interrupt, Signal::Terminate])?;
    let mut chat = Chat { session, tokenizer, is_chat, sampling: args.sampling, messages: Vec::new(), signals };
    if let Some(system) = args.system {
        chat.messages.push(json!({"role": "system", "content": system}));
    }
    match prompt {
        Some(prompt) => Ok(match chat.turn(&prompt).await? {
            None | Some(Signal::Interrupt) => ExitCode::SUCCESS,
            Some(signal) => signal.exit_code(),
        }),
        None => {
            let _writer = chat.session.keep_packed(None);
            chat::converse(&mut chat).await
        }
    }
}

fn standard_input() -> Result<String> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("could not read standard input")?;
    text.truncate(text.trim_end_matches('\n').len());
    Ok(text)
}

pub struct Chat {
    pub session: Session,
    tokenizer: Arc<Tokenizer>,
    /// Prompts go through the model's chat template.
    is_chat: bool,
    sampling: SamplingArgs,
    pub messages: Vec<Value>,
    pub signals: Signals,
}

impl Chat {
    /// Submits a prompt and prints the answer as it is generated. A signal ends the answer and is
    /// returned.
    pub async fn turn(&mut self, prompt: &str) -> Result<Option<Signal>> {
        self.messages.push(json!({"role": "user", "content": prompt}));
        let tokens = self.tokens(prompt)?;
        let room = self.session.plan.max_model_len.saturating_sub(tokens.len());
        if room == 0 {
            bail!(
                "the conversation has {} tokens, but the model's context is {}; start a new one",
                tokens.len(),
                self.session.plan.max_model_len
            );
        }
        let params = params(&self.sampling, &self.session.assets.defaults, room);
        let request = self.session.engine.request(tokens, params)?;
        let shown = TextOptions { skip_special: true, ..TextOptions::default() };
        let mut stream = TextStream::new(self.session.engine.submit(request)?, &self.tokenizer, 1, &shown);
        let mut answer = String::new();
        let signal = loop {
            let piece = tokio::select! {
                piece = stream.next() => piece,
                signal = self.signals.next() => break Some(signal),
            };
            let Some(piece) = piece else { break None };
            out!("{}", piece.text)?;
            answer.push_str(&piece.text);
            if let Some((Finish::Failed(message), _)) = piece.finish {
                bail!("{message}");
            }
        };
        out!("\n")?;
        self.messages.push(json!({"role": "assistant", "content": answer}));
        Ok(signal)
    }

    fn tokens(&self, prompt: &str) -> Result<Vec<u32>> {
        match self.is_chat {
            true => self.session.chat_tokens(&self.messages),
            false => self.session.text_tokens(prompt),
        }
    }
}

/// Sampling parameters: the defaults of a server, overridden by flags.
fn params(args: &SamplingArgs, defaults: &SamplingDefaults, room: usize) -> SamplingParams {
    let standard = defaults.params();
    SamplingParams {
        temperature: args.temperature.unwrap_or(standard.temperature),
        top_p: args.top_p.unwrap_or(standard.top_p),
        top_k: args.top_k.or(standard.top_k).filter(|&k| k > 0),
        min_p: args.min_p.unwrap_or(standard.min_p),
        repetition_penalty: args.repetition_penalty.unwrap_or(standard.repetition_penalty),
        seed: args.seed.unwrap_or_else(|| RandomState::new().hash_one(0u8)),
        max_tokens: defaults.max_tokens(args.max_tokens, room).min(room),
        ..standard
    }
}
