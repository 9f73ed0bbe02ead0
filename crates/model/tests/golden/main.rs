//! Every family against Hugging Face transformers, by small random models with weights that both
//! sides generate.
//!
//! The expected values are in `tests/golden/models`, written by `generate.py` there; nothing in
//! them comes from this project's own arithmetic.

mod agreement;
mod crowd;
mod cuda;
mod drafts;
mod families;
mod file;
mod generator;
mod gguf;
mod gguf_names;
mod habits;
mod heads;
mod hidden;
mod packed;
mod quantized;
mod run;
mod switch_off;
mod trained;
