//! How large a model is at rest.

use folio_model::{OpenModel, parameters};

/// Bytes of all tensors in the model's files.
pub fn disk_bytes(model: &OpenModel) -> u64 {
    let names = model.weights.names();
    names.into_iter().filter_map(|name| model.weights.tensor(name)).map(|tensor| tensor.bytes.len() as u64).sum()
}

/// Bits at rest for each number the model has learned, everything counted: scales, norms, what was
/// kept in 16 bits.
pub fn bits_per_weight(model: &OpenModel) -> f64 {
    8.0 * disk_bytes(model) as f64 / parameters(&model.spec).total as f64
}
