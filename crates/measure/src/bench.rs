//! Speed of a model: how fast it answers, how near that is to the peak rates of this machine, and
//! whether the scheduler keeps its promises.
//!
//! Rates that are compared are measured in the same run, in turns: a machine that is shared or
//! throttled then slows both.

mod ceilings;
mod cost;
pub mod fairness;
pub mod http;
pub mod interference;
pub mod prefix;
mod profile;
pub mod rates;
mod rates_text;
mod rounds;
pub mod speculate;
mod streams;
mod waste;

use anyhow::{Context, Result, bail};
use folio_session::random_model::{self, Shape};
use folio_session::{Assets, Hooks, LoadFormat, Options, Session};

/// The model of a bench, and how it is run.
#[derive(Clone, Debug)]
pub struct Model {
    /// By default the built-in one.
    pub name: Option<String>,
    /// Random weights of this shape instead of the model's.
    pub shape: Option<Shape>,
    pub options: Options,
    /// Makes the hooks of each session that the bench starts.
    pub hooks: fn() -> Hooks,
}

impl Model {
    /// An engine for sequences of at most `max_len` unless the options say otherwise (by default
    /// the model's context), `max_seqs` at once.
    fn start(&self, max_seqs: usize, max_len: Option<usize>, change: impl FnOnce(&mut Options)) -> Result<Session> {
        let mut options = self.options.clone();
        let name = match self.shape {
            Some(shape) => {
                let cache = options.folders.cache.as_ref().context("random weights need a cache folder")?;
                Some(random_model::folder(shape, cache)?.to_string_lossy().into_owned())
            }
            None => self.name.clone(),
        };
        if self.shape.is_some_and(random_model::is_made_on_device) && !options.device.load_format.is_dummy() {
            options.device.load_format = LoadFormat::Dummy;
        }
        options.max_num_seqs = Some(max_seqs);
        options.max_model_len = options.max_model_len.or(max_len);
        change(&mut options);
        Session::start(Assets::open(name.as_deref(), &options)?, &options, (self.hooks)())
    }
}

fn at_least(flag: &str, value: usize, least: usize) -> Result<()> {
    if value < least {
        bail!("{flag} is {value}, but must be at least {least}");
    }
    Ok(())
}
