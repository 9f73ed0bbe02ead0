//! `cargo xtask goldens`: the committed expectations, generated again by an independent
//! implementation.

use anyhow::Result;

use crate::{prepare, process};

/// Versions are pinned so that a regenerated file differs only where the tests' cases did.
const PACKAGES: &[&str] = &["torch==2.15.0", "transformers==5.22.2", "gguf==0.19.0", "safetensors", "numpy"];

/// Quantizing tools. They require older versions of the packages above than those, so their other
/// requirements are listed here.
const QUANTIZERS: &[&str] = &[
    "accelerate==1.15.0",
    "auto-round==0.16.1",
    "compressed-tensors==0.19.0",
    "llmcompressor==0.14.0.1",
    "nvidia-modelopt==0.47.0",
];
const QUANTIZERS_NEED: &[&str] = &[
    "datasets",
    "loguru",
    "ninja",
    "nvidia-ml-py",
    "omegaconf",
    "pillow",
    "psutil",
    "pulp",
    "pydantic",
    "pyyaml",
    "regex",
    "requests",
    "rich",
    "scipy",
    "setuptools",
];
/// The last versions that wrote `weight_g_idx`.
const OLDER: &[&str] = &["compressed-tensors==0.11.0", "frozendict"];

const SCRIPTS: &[&str] = &[
    "crates/formats/tests/golden/make.py",
    "crates/model/tests/published/facts.py",
    "crates/text/tests/data/control.py",
    "tests/golden/models/generate.py",
    "tests/golden/templates/render.py",
    "tests/golden/default_model.py",
    "tests/golden/heads/generate.py",
    "tests/golden/heads/shipped.py",
];

pub fn run() -> Result<()> {
    let python = prepare::venv("goldens", PACKAGES)?;
    let llama_cpp = prepare::llama_cpp()?;
    for script in SCRIPTS {
        eprintln!("== {script}");
        process::run(process::command(&python, &[script]).env("FOLIO_LLAMA_CPP", &llama_cpp))?;
    }
    quantized()
}

/// Packed and quantized checkpoints, in a separate environment.
fn quantized() -> Result<()> {
    let python = prepare::venv("quantizers", &[PACKAGES, QUANTIZERS_NEED].concat())?;
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"];
    process::run(process::command(&python, &pip).args(QUANTIZERS))?;
    let older = prepare::cache().join("compressed-tensors-older");
    process::run(process::command(&python, &pip).arg("--upgrade").arg("--target").arg(&older).args(OLDER))?;
    eprintln!("== tests/golden/quantized");
    process::run(process::command(&python, &["tests/golden/quantized/packings.py", "--older"]).arg(&older))?;
    process::run(&mut process::command(&python, &["tests/golden/quantized/seeded.py"]))?;
    process::run(&mut process::command(&python, &["tests/golden/quantized/folders.py"]))
}
