//! Position encodings: every kind of scaling becomes a table of inverse frequencies and a
//! magnitude.
//!
//! Two kinds depend on length (`dynamic` and `longrope`). The table is chosen once, by the longest
//! context the model is loaded for, never by a sequence's current length: a prompt computed in
//! chunks then equals one computed whole.

use serde_json::json;

use crate::{Config, Result, RopeSpec};

/// Facts about the model that a position encoding needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RopeShape {
    pub head_dim: usize,
    /// `max_position_embeddings`: the length that the checkpoint was made for.
    pub positions: usize,
    /// The longest context that positions and their scaling reach.
    pub longest: usize,
    /// The context that the model is loaded for.
    pub max_context: usize,
}

/// Reach of position encodings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reach {
    /// The context of a model without a request for another.
    pub own: usize,
    pub longest: usize,
}

impl Reach {
    /// For a model whose `positions` already include the scaling.
    pub fn stated(positions: usize) -> Self {
        Self { own: positions, longest: positions }
    }

    /// As in vLLM: `linear` lengthens `max_position_embeddings` by its factor, `yarn` the length
    /// before scaling by its own. A checkpoint that states a longer context keeps it. `llama3` and
    /// `longrope` state the length after scaling, and `dynamic` reaches any requested length.
    pub fn of(config: &Config, positions: usize, most: usize) -> Result<Self> {
        let outer = parameters(config)?;
        let params = match outer.object("full_attention")? {
            Some(full) => full,
            None if outer.has("sliding_attention") => empty(config),
            None => outer,
        };
        let reached = match kind(&params)? {
            "linear" => positions as f64 * positive(&params, "factor")?,
            "yarn" if params.has("factor") => original(config, &params, positions)? * positive(&params, "factor")?,
            _ => positions as f64,
        };
        let longest = (reached.min(most as f64) as usize).max(positions);
        // The context in a file of weights includes everything; a longer one is available on
        // request.
        Ok(Self { own: if config.states_context() { positions } else { longest }, longest })
    }
}

/// The position encoding that a whole model shares.
pub(crate) fn shared(config: &Config, default_theta: f64, shape: RopeShape) -> Result<RopeSpec> {
    let params = parameters(config)?;
    for nested in ["full_attention", "sliding_attention"] {
        if params.has(nested) {
            return Err(params.refuse(nested, "gives positions per layer type, which this family does not have"));
        }
    }
    build(config, with_theta(config, params, "rope_theta", default_theta)?, shape)
}

/// The position encoding of one layer type, for families that have two. `base_field` is
/// transformers 4's field for its base; `scaled` says whether transformers 4's `rope_scaling`
/// applies to it.
pub(crate) fn per_layer_type(
    config: &Config,
    layer_type: &str,
    base_field: &str,
    default_theta: f64,
    scaled: bool,
    shape: RopeShape,
) -> Result<RopeSpec> {
    let outer = parameters(config)?;
    let nested = outer.has("full_attention") || outer.has("sliding_attention");
    let params = match outer.object(layer_type)? {
        Some(params) => params,
        None if !nested && scaled => outer,
        None => empty(config),
    };
    build(config, with_theta(config, params, base_field, default_theta)?, shape)
}

/// `rope_scaling` as transformers 4 writes it, or `rope_parameters` as 5 does; empty if neither is
/// given.
fn parameters(config: &Config) -> Result<Config> {
    for field in ["rope_scaling", "rope_parameters"] {
        if let Some(params) = config.object(field)? {
            return Ok(params);
        }
    }
    Ok(empty(config))
}

fn empty(config: &Config) -> Config {
    let mut holder = config.clone();
    holder.set("rope_parameters", json!({}));
    holder.object("rope_parameters").ok().flatten().unwrap_or(holder)
}

fn with_theta(config: &Config, mut params: Config, base_field: &str, default_theta: f64) -> Result<Config> {
    if !params.has("rope_theta") {
        params.set("rope_theta", json!(config.f64_or(base_field, default_theta)?));
    }
    if let (false, Some(partial)) = (params.has("partial_rotary_factor"), config.f64("partial_rotary_factor")?) {
        params.set("partial_rotary_factor", json!(partial));
    }
    Ok(params)
}

fn kind(params: &Config) -> Result<&str> {
    match params.str("rope_type")? {
        Some(kind) => Ok(kind),
        None => Ok(params.str("type")?.unwrap_or("default")),
    }
}

/// The context length before scaling: outside the scaling object if the family has it there.
fn original(config: &Config, params: &Config, positions: usize) -> Result<f64> {
    let field = "original_max_position_embeddings";
    let holder = if config.has(field) { config } else { params };
    Ok(holder.size_or(field, positions, 1 << 40)? as f64)
}

fn build(config: &Config, params: Config, shape: RopeShape) -> Result<RopeSpec> {
    let kind = kind(&params)?.to_owned();
    let theta = positive(&params, "rope_theta")?;
    let dim = rotated_values(&params, shape.head_dim)?;
    let plain = inverse_frequencies(theta, dim);
    let scaling = Scaling { config, params: &params, shape, theta, dim };
    let (inv_freq, magnitude) = match kind.as_str() {
        "default" => (plain, 1.0),
        "linear" => {
            let factor = positive(&params, "factor")?;
            (plain.into_iter().map(|f| f / factor).collect(), 1.0)
        }
        "dynamic" => (scaling.dynamic()?, 1.0),
        "llama3" => (scaling.llama3(plain)?, 1.0),
        "yarn" => scaling.yarn(plain)?,
        "longrope" | "su" => scaling.longrope(plain)?,
        other => {
            let field = if params.has("rope_type") { "rope_type" } else { "type" };
            let known = "default, linear, dynamic, yarn, llama3 and longrope";
            return Err(params.refuse(field, format!("is {other:?}, but only {known} are supported")));
        }
    };
    if kind != "dynamic" && shape.max_context > shape.longest {
        let scaled = match shape.longest > shape.positions {
            true => format!(" and {kind} scaling reaches {}", shape.longest),
            false => String::new(),
        };
        let problem = format!("is {}{scaled}, but a context of {} was asked for", shape.positions, shape.max_context);
        return Err(config.refuse("max_position_embeddings", problem));
    }
    let inv_freq: Vec<f32> = inv_freq.into_iter().map(|f| f as f32).collect();
    match inv_freq.iter().all(|f| f.is_finite()) && f64::is_finite(magnitude) {
        true => Ok(RopeSpec { inv_freq, magnitude: magnitude as f32 }),
        false => Err(params.refuse("rope_theta", format!("of {theta} gives frequencies that are not finite"))),
    }
}

fn rotated_values(params: &Config, head_dim: usize) -> Result<usize> {
    let partial = params.f64_or("partial_rotary_factor", 1.0)?;
    let dim = (head_dim as f64 * partial).floor();
    if partial > 0.0 && partial <= 1.0 && dim >= 2.0 && (dim as usize).is_multiple_of(2) {
        return Ok(dim as usize);
    }
    let problem = format!("is {partial}, but must turn an even number of a head's {head_dim} values");
    Err(params.refuse("partial_rotary_factor", problem))
}

fn inverse_frequencies(theta: f64, dim: usize) -> Vec<f64> {
    (0..dim / 2).map(|pair| 1.0 / theta.powf((2 * pair) as f64 / dim as f64)).collect()
}

fn positive(params: &Config, field: &str) -> Result<f64> {
    let value = params.need_f64(field)?;
    if value > 0.0 { Ok(value) } else { Err(params.refuse(field, format!("is {value}, but must be above 0"))) }
}

struct Scaling<'a> {
    config: &'a Config,
    params: &'a Config,
    shape: RopeShape,
    theta: f64,
    /// Number of rotated values of a head.
    dim: usize,
}

impl Scaling<'_> {
    fn original(&self) -> Result<f64> {
        original(self.config, self.params, self.shape.positions)
    }

    /// Stretches the base if more context is requested than the checkpoint was made for.
    fn dynamic(&self) -> Result<Vec<f64>> {
        let factor = positive(self.params, "factor")?;
        if self.dim < 4 {
            return Err(self.params.refuse("rope_type", "is \"dynamic\", which needs at least 4 rotated values"));
        }
        let length = self.shape.max_context.max(self.shape.positions) as f64;
        let stretch = factor * length / self.shape.positions as f64 - (factor - 1.0);
        let theta = self.theta * stretch.powf(self.dim as f64 / (self.dim as f64 - 2.0));
        Ok(inverse_frequencies(theta, self.dim))
    }

    fn llama3(&self, plain: Vec<f64>) -> Result<Vec<f64>> {
        let factor = positive(self.params, "factor")?;
        let low = positive(self.params, "low_freq_factor")?;
        let high = positive(self.params, "high_freq_factor")?;
        if high <= low {
            let problem = format!("is {high}, but must be above low_freq_factor, which is {low}");
            return Err(self.params.refuse("high_freq_factor", problem));
        }
        let original = self.original()?;
        let scaled = |frequency: f64| {
            let turns = original * frequency / (2.0 * std::f64::consts::PI);
            if turns > high {
                frequency
            } else if turns < low {
                frequency / factor
            } else {
                let smooth = (turns - low) / (high - low);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        };
        Ok(plain.into_iter().map(scaled).collect())
    }

    fn yarn(&self, plain: Vec<f64>) -> Result<(Vec<f64>, f64)> {
        let original = self.original()?;
        let factor = match self.params.has("factor") {
            true => positive(self.params, "factor")?,
            false => self.shape.positions as f64 / original,
        };
        // 0 stands for the default, like an absent value.
        let beta = |field, default| match self.params.f64_or(field, default) {
            Ok(0.0) => Ok(default),
            given => given,
        };
        let (fast, slow) = (beta("beta_fast", 32.0)?, beta("beta_slow", 1.0)?);
        if fast < 0.0 || slow < 0.0 || self.theta <= 1.0 {
            return Err(self.params.refuse("rope_theta", "must be above 1, and the betas above 0, for yarn"));
        }
        let pair_with_turns = |turns: f64| {
            self.dim as f64 * (original / (turns * 2.0 * std::f64::consts::PI)).ln() / (2.0 * self.theta.ln())
        };
        let (mut first, mut last) = (pair_with_turns(fast), pair_with_turns(slow));
        if self.params.bool_or("truncate", true)? {
            (first, last) = (first.floor(), last.ceil());
        }
        (first, last) = (first.max(0.0), last.min(self.dim as f64 - 1.0));
        if first == last {
            last += 0.001;
        }
        let blend = |(pair, frequency): (usize, f64)| {
            let interpolated = ((pair as f64 - first) / (last - first)).clamp(0.0, 1.0);
            frequency / factor * interpolated + frequency * (1.0 - interpolated)
        };
        Ok((plain.into_iter().enumerate().map(blend).collect(), self.yarn_magnitude(factor)?))
    }

    fn yarn_magnitude(&self, factor: f64) -> Result<f64> {
        if let Some(given) = self.params.f64("attention_factor")? {
            return Ok(given);
        }
        let grow = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        let (mscale, all_dim) = (self.params.f64_or("mscale", 0.0)?, self.params.f64_or("mscale_all_dim", 0.0)?);
        Ok(if mscale != 0.0 && all_dim != 0.0 { grow(mscale) / grow(all_dim) } else { grow(1.0) })
    }

    fn longrope(&self, plain: Vec<f64>) -> Result<(Vec<f64>, f64)> {
        let original = self.original()?;
        let field = if self.shape.max_context as f64 > original { "long_factor" } else { "short_factor" };
        let factors = self.params.numbers(field)?.ok_or_else(|| self.params.refuse(field, "is missing"))?;
        if factors.len() != plain.len() || factors.iter().any(|f| *f <= 0.0) {
            let problem = format!("has {} entries, but must have {} above 0", factors.len(), plain.len());
            return Err(self.params.refuse(field, problem));
        }
        let factor = self.params.f64_or("factor", self.shape.positions as f64 / original)?;
        let magnitude = match self.params.f64("attention_factor")? {
            Some(given) => given,
            None if factor <= 1.0 || original <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / original.ln()).sqrt(),
        };
        Ok((plain.iter().zip(&factors).map(|(f, by)| f / by).collect(), magnitude))
    }
}

#[cfg(test)]
mod tests;
