//! `folio run`: one answer, or a chat.

use std::io::{IsTerminal, Read, Write};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use folio_engine::SamplingParams;
use folio_server::{Finish, TextOptions, TextStream};
use folio_text::{ChatRender, ChatTemplate, Tokenizer};
use serde_json::{Value, json};

use crate::args::{RunArgs, SamplingArgs};
use crate::assets::Assets;
use crate::session::Session;

/// A chat needs one request at a time, so it plans memory for few.
const CHAT_SEQS: usize = 4;

pub fn main(args: RunArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run(args))
}

async fn run(args: RunArgs) -> Result<()> {
    let assets = Assets::open_as(args.model.model.as_deref(), &args.model.engine)?;
    let Some(tokenizer) = assets.tokenizer.clone() else {
        bail!("{} has no tokenizer; `folio run` needs one: put tokenizer.json beside the weights", assets.name);
    };
    let template = if args.raw { None } else { assets.template.clone() };
    let mut engine_args = args.model.engine.clone();
    engine_args.max_num_seqs = Some(engine_args.max_num_seqs.unwrap_or(CHAT_SEQS).min(CHAT_SEQS));
    let session = Session::start(assets, &engine_args)?;
    let mut chat = Chat { session, tokenizer, template, sampling: args.sampling, messages: Vec::new() };
    if let Some(system) = args.system {
        chat.messages.push(json!({"role": "system", "content": system}));
    }
    match args.prompt.as_deref() {
        Some("-") => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).context("could not read standard input")?;
            chat.turn(text.trim_end_matches('\n')).await.map(drop)
        }
        Some(prompt) => chat.turn(prompt).await.map(drop),
        None => {
            // Of one answer nobody would wait for it.
            let _writer = chat.session.keep_packed(None);
            chat.converse().await
        }
    }
}

struct Chat {
    session: Session,
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<ChatTemplate>>,
    sampling: SamplingArgs,
    messages: Vec<Value>,
}

impl Chat {
    /// Asks and prints the answer as it comes; Ctrl-C ends the answer.
    async fn turn(&mut self, prompt: &str) -> Result<String> {
        self.messages.push(json!({"role": "user", "content": prompt}));
        let tokens = self.tokens(prompt)?;
        let room = self.session.plan.max_model_len.saturating_sub(tokens.len());
        if room == 0 {
            bail!(
                "the conversation has {} tokens and the model's context is {}; start anew",
                tokens.len(),
                self.session.plan.max_model_len
            );
        }
        let params = params(&self.sampling, room);
        let request = self.session.engine.request(tokens, params)?;
        let shown = TextOptions { skip_special: true, ..TextOptions::default() };
        let mut stream = TextStream::new(self.session.engine.submit(request)?, &self.tokenizer, 1, &shown);
        let mut answer = String::new();
        let mut out = std::io::stdout();
        loop {
            let piece = tokio::select! {
                piece = stream.next() => piece,
                signal = tokio::signal::ctrl_c() => { signal?; None }
            };
            let Some(piece) = piece else { break };
            write!(out, "{}", piece.text)?;
            out.flush()?;
            answer.push_str(&piece.text);
            if let Some((Finish::Failed(message), _)) = piece.finish {
                bail!("{message}");
            }
        }
        writeln!(out)?;
        self.messages.push(json!({"role": "assistant", "content": answer}));
        Ok(answer)
    }

    fn tokens(&self, prompt: &str) -> Result<Vec<u32>> {
        let Some(template) = &self.template else { return Ok(self.tokenizer.encode(prompt, true)?) };
        let mut render = ChatRender {
            messages: self.messages.clone(),
            add_generation_prompt: true,
            now: Some(folio_server::now()),
            ..ChatRender::default()
        };
        // What is pasted into a chat does not end a turn of it.
        let mark = self.tokenizer.control_tokens().mark(&mut render)?;
        Ok(self.tokenizer.encode_marked(&template.render(&render)?, mark)?)
    }

    async fn converse(&mut self) -> Result<()> {
        let interactive = std::io::stdin().is_terminal();
        if interactive {
            eprintln!(
                "{}: ask away; Ctrl-C stops an answer, /new starts anew, Ctrl-D or /exit leaves",
                self.session.assets.name
            );
        }
        let system: Vec<Value> = self.messages.clone();
        loop {
            if interactive {
                eprint!("> ");
            }
            let line = tokio::select! {
                line = tokio::task::spawn_blocking(read_line) => line??,
                signal = tokio::signal::ctrl_c() => {
                    signal?;
                    eprintln!("\n(Ctrl-D or /exit leaves)");
                    continue;
                }
            };
            match line.as_deref().map(str::trim) {
                None | Some("/exit") => return Ok(()),
                Some("") => {}
                Some("/new") => self.messages.clone_from(&system),
                Some(prompt) => {
                    if let Err(error) = self.turn(prompt).await {
                        eprintln!("error: {error:#}");
                        self.messages.clone_from(&system);
                    }
                }
            }
        }
    }
}

fn read_line() -> Result<Option<String>> {
    let mut line = String::new();
    let bytes = std::io::stdin().read_line(&mut line).context("could not read standard input")?;
    Ok((bytes > 0).then_some(line))
}

fn params(args: &SamplingArgs, room: usize) -> SamplingParams {
    SamplingParams {
        temperature: args.temperature,
        top_p: args.top_p,
        top_k: args.top_k,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        seed: args.seed,
        max_tokens: args.max_tokens.unwrap_or(room).min(room),
        ..SamplingParams::default()
    }
}
