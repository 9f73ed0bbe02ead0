//! Checkpoint layouts: how other tools pack quantized weights into safetensors. Each reads the
//! tensors that make up one linear layer and returns a [`Matrix`]. Each has one row in a table and
//! one file; code that uses the [`Matrix`] does not know which it was.

mod awq;
mod bitsandbytes;
mod compressed_tensors;
mod fp4;
mod fp8;
mod gptq;
mod layer;
mod modelopt;
mod patterns;
mod scales;
mod words;

use std::fmt;

use serde_json::Value;

use crate::error::shown;
use crate::{Error, Format, Matrix, Result, TensorView, WeightSource};

/// One checkpoint layout of a linear layer's weight, with its parameters from the checkpoint's
/// configuration.
pub trait Packing: Send + Sync + fmt::Debug {
    /// Whether the layer `stem` (`model.layers.0.mlp.up_proj`, without a suffix) is packed this
    /// way. A layer that was excluded from quantization is not: it has a plain `.weight`.
    fn holds(&self, source: &dyn WeightSource, stem: &str) -> bool;

    /// The matrix of a layer that [`Packing::holds`]: `rows` outputs, `cols` inputs.
    fn matrix<'a>(&self, source: &'a dyn WeightSource, stem: &str, rows: usize, cols: usize) -> Result<Packed<'a>>;
}

/// A layer's matrix and the tensors it came from; their pages may be freed once it has been copied.
#[derive(Debug)]
pub struct Packed<'a> {
    pub matrix: Matrix<'a>,
    pub tensors: Vec<String>,
}

/// Reads the parameters of a packing from `quantization_config`.
type Open = fn(&Value) -> Result<Box<dyn Packing>>;

/// Every packing by its `quant_method`.
const METHODS: &[(&str, Open)] = &[
    ("awq", awq::open),
    ("bitsandbytes", bitsandbytes::open),
    ("compressed-tensors", compressed_tensors::CompressedTensors::open),
    ("fbgemm_fp8", fp8::Fp8::open),
    ("fp8", fp8::Fp8::open),
    ("gptq", gptq::open),
    ("modelopt", modelopt::ModelOpt::open),
    ("modelopt_fp4", modelopt::ModelOpt::open),
];

/// The layout that a `quantization_config` describes; `None` for `mxfp4`, in which the expert
/// tensors are recognized by themselves.
pub fn open(config: &Value) -> Result<Option<Box<dyn Packing>>> {
    let Some(method) = config.get("quant_method").and_then(Value::as_str) else {
        return Err(scheme("quant_method", "is missing"));
    };
    if method == "mxfp4" {
        return Ok(None);
    }
    match METHODS.iter().find(|(name, _)| *name == method) {
        Some((_, open)) => open(config).map(Some),
        None => {
            let known: Vec<&str> = METHODS.iter().map(|(name, _)| *name).chain(["mxfp4"]).collect();
            Err(scheme("quant_method", format!("is \"{}\", but only {} are read", shown(method), known.join(", "))))
        }
    }
}

/// A refusal of one field of `quantization_config`.
pub(crate) fn scheme(field: &str, problem: impl Into<String>) -> Error {
    Error::Scheme { field: field.to_owned(), problem: problem.into() }
}

/// A value of a configuration for an error message, shortened for one line.
pub(crate) fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}

/// A refusal of one packed tensor.
pub(crate) fn packed(name: &str, problem: impl Into<String>) -> Error {
    Error::Packed { name: shown(name), problem: problem.into() }
}

/// The tensor of that name, of that shape and one of those storage formats.
pub(crate) fn tensor<'a>(
    source: &'a dyn WeightSource,
    name: &str,
    shape: &[usize],
    formats: &[Format],
) -> Result<TensorView<'a>> {
    let view = source.require(name)?;
    if view.shape != shape {
        return Err(packed(name, format!("has shape {:?}, but {shape:?} is needed", view.shape)));
    }
    if !formats.contains(&view.format) {
        let names: Vec<&str> = formats.iter().map(|format| format.name()).collect();
        return Err(packed(name, format!("is stored as {}, but {} is needed", view.format, names.join(" or "))));
    }
    Ok(view)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unknown_methods_are_refused_by_name() {
        for (config, expect) in [
            (json!({}), "quantization_config.quant_method is missing"),
            (json!({"quant_method": 4}), "quantization_config.quant_method is missing"),
            (json!({"quant_method": "odd"}), "is \"odd\", but only "),
        ] {
            let error = open(&config).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        }
        assert!(open(&json!({"quant_method": "mxfp4"})).unwrap().is_none());
    }
}
