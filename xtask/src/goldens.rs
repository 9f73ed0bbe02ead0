//! `cargo xtask goldens`: the committed expectations, made anew by an independent implementation.

use anyhow::Result;

use crate::{prepare, process};

/// Versions are pinned so that a regenerated file differs only where the tests' cases did.
const PACKAGES: &[&str] = &["torch==2.15.0", "transformers==5.22.2", "gguf==0.19.0", "safetensors", "numpy"];

const SCRIPTS: &[&str] = &[
    "crates/formats/tests/golden/make.py",
    "crates/model/tests/published/facts.py",
    "tests/golden/models/generate.py",
    "tests/golden/templates/render.py",
    "tests/golden/default_model.py",
];

pub fn run() -> Result<()> {
    let python = prepare::venv("goldens", PACKAGES)?;
    let llama_cpp = prepare::llama_cpp()?;
    for script in SCRIPTS {
        eprintln!("== {script}");
        process::run(process::command(&python, &[script]).env("FOLIO_LLAMA_CPP", &llama_cpp))?;
    }
    Ok(())
}
