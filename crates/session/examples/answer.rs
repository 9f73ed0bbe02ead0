//! Answers one prompt: `cargo run --example answer -p folio-session -- "What is a slice?" [MODEL]`.

use anyhow::Result;
use folio_session::{Options, Session};

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let prompt = args.next().unwrap_or("What does `Rc::clone` do?".into());
    let session = Session::open(args.next().as_deref(), &Options::default())?;
    println!("{}", session.answer(&prompt)?);
    Ok(())
}
