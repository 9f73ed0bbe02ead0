//! Prints an answer as it is generated, with the progress of loading and options of its own:
//! `cargo run --example stream -p folio-session`.

use std::io::Write;

use anyhow::Result;
use folio_session::{Assets, Hooks, MemoryBudget, Method, Options, Session};

fn main() -> Result<()> {
    let mut options = Options { threads: Some(2), max_num_seqs: Some(1), ..Options::default() };
    options.memory.budget = MemoryBudget::Total(512 << 20);
    options.speculate.method = Method::Auto;
    let hooks = Hooks {
        progress: Some(Box::new(|progress| {
            eprint!("\rloading {} of {} bytes", progress.bytes_done, progress.bytes_total);
        })),
        load_warning: Some(|line| eprintln!("warning: {line}")),
        ..Hooks::default()
    };
    let session = Session::start(Assets::open(None, &options)?, &options, hooks)?;
    eprintln!("\n{}", session.plan.to_text(&session.assets.name).trim_end());

    let tokens = session.text_tokens("fn main() {")?;
    let mut params = session.params(tokens.len());
    (params.temperature, params.max_tokens) = (0.0, 64);
    for piece in session.generate(tokens, params)? {
        print!("{}", piece?);
        std::io::stdout().flush()?;
    }
    println!();
    session.end();
    Ok(())
}
