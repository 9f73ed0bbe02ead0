//! `folio eval`: how well a model predicts a text.

use anyhow::{Context, Result, bail};
use folio_engine::{Event, FinishReason, SamplingParams};
use indicatif::ProgressBar;
use serde_json::json;

use crate::args::EvalArgs;
use crate::assets::Assets;
use crate::session::Session;

pub fn main(args: &EvalArgs) -> Result<()> {
    let text = std::fs::read_to_string(&args.text).with_context(|| args.text.display().to_string())?;
    let assets = Assets::open(args.model.model.as_deref(), args.model.engine.max_model_len)?;
    let Some(tokenizer) = assets.tokenizer.clone() else {
        bail!("{} has no tokenizer; `folio eval` needs one", assets.name);
    };
    let mut engine = args.model.engine.clone();
    // One window is one request; a second keeps the engine busy while the first is read.
    engine.max_num_seqs = 2;
    let session = Session::start(assets, &engine)?;
    // One place is left for the token that the engine samples after a prompt.
    let longest = session.plan.max_model_len - 1;
    if !(2..=longest).contains(&args.window) {
        bail!("--window must lie between 2 and {longest}, the model's context less one");
    }
    let tokens = tokenizer.encode(&text, false)?;
    let score = score(&session, &tokens, args.window)?;
    report(args, &session, &score, text.len());
    Ok(())
}

/// Sums over all scored tokens.
#[derive(Debug, Default)]
struct Score {
    nats: f64,
    scored: usize,
    tokens: usize,
    windows: usize,
}

fn score(session: &Session, tokens: &[u32], window: usize) -> Result<Score> {
    let windows: Vec<&[u32]> = tokens.chunks(window).filter(|window| window.len() > 1).collect();
    if windows.is_empty() {
        bail!("the text has {} tokens; at least 2 are needed", tokens.len());
    }
    let bar = ProgressBar::new(windows.len() as u64);
    let mut total = Score { tokens: tokens.len(), windows: windows.len(), ..Score::default() };
    let mut waiting = std::collections::VecDeque::new();
    let mut next = windows.iter();
    loop {
        while waiting.len() < 2
            && let Some(window) = next.next()
        {
            let params = SamplingParams { max_tokens: 1, prompt_logprobs: Some(0), ..SamplingParams::default() };
            waiting.push_back(session.engine.submit(session.engine.request(window.to_vec(), params)?)?);
        }
        let Some(mut stream) = waiting.pop_front() else { break };
        while let Some(event) = stream.recv() {
            match event {
                Event::PromptLogprobs(logprobs) => {
                    for entry in logprobs.iter().flatten() {
                        total.nats -= f64::from(entry.logprob);
                        total.scored += 1;
                    }
                }
                Event::Finished { reason: FinishReason::Error(message), .. } => bail!("{message}"),
                Event::Token { .. } | Event::StopToken { .. } | Event::Embedding(_) | Event::Finished { .. } => {}
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(total)
}

fn report(args: &EvalArgs, session: &Session, score: &Score, text_bytes: usize) {
    let nats = score.nats / score.scored as f64;
    // Every byte of the text is paid for by the tokens that were scored: the unscored first ones are few.
    let bits_per_byte = nats / std::f64::consts::LN_2 * score.tokens as f64 / text_bytes as f64;
    let perplexity = nats.exp();
    if args.json {
        let value = json!({
            "model": session.assets.name, "text": args.text.display().to_string(), "window": args.window,
            "windows": score.windows, "tokens": score.tokens, "tokens_scored": score.scored, "bytes": text_bytes,
            "nats_per_token": nats, "perplexity": perplexity, "bits_per_byte": bits_per_byte,
        });
        println!("{value}");
        return;
    }
    println!("model            {}", session.assets.name);
    println!("text             {} ({text_bytes} bytes, {} tokens)", args.text.display(), score.tokens);
    println!("windows          {} of {} tokens, {} tokens scored", score.windows, args.window, score.scored);
    println!("nats per token   {nats:.5}");
    println!("perplexity       {perplexity:.4}");
    println!("bits per byte    {bits_per_byte:.5}");
}
