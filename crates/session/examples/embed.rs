//! Compares texts by the angle between their embeddings: `cargo run --example embed -p
//! folio-session`.

use anyhow::Result;
use folio_engine::Pooling;
use folio_session::{Options, Session};

fn main() -> Result<()> {
    let session = Session::open(None, &Options::default())?;
    let question = "How do I read a file into a string?";
    let texts = [
        "Use std::fs::read_to_string, which returns the contents of a file.",
        "A trait object is a pointer to a value and a pointer to a table of methods.",
        "Match arms must cover every variant of an enum.",
    ];
    let asked = session.embed(question, Pooling::Mean)?;
    println!("{question}");
    for text in texts {
        println!("{:.3}  {text}", cosine(&asked, &session.embed(text, Pooling::Mean)?));
    }
    Ok(())
}

/// The cosine of the angle between two vectors.
fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}
