//! Untrained heads that are sometimes right: they repeat the model's last token.

use std::collections::BTreeMap;

use folio_formats::{Format, TensorView, WeightSource};
use folio_model::ModelSpec;

/// Tensors by name, in f32.
#[derive(Clone, Default)]
pub struct Made(BTreeMap<String, (Vec<usize>, Vec<u8>)>);

impl Made {
    fn put(mut self, name: &str, shape: &[usize], value: impl Fn(usize, usize) -> f32) -> Self {
        let (rows, cols) = (shape[0], shape.get(1).copied().unwrap_or(1));
        let places = (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col)));
        let bytes = places.flat_map(|(row, col)| value(row, col).to_le_bytes()).collect();
        self.0.insert(name.to_owned(), (shape.to_vec(), bytes));
        self
    }
}

impl WeightSource for Made {
    fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, (shape, bytes)) = self.0.get_key_value(name)?;
        Some(TensorView { name, format: Format::F32, shape: shape.clone(), bytes })
    }

    fn release(&self, _: &str) {}
}

/// They do not change the state.
pub fn medusa(hidden: usize, heads: usize) -> Made {
    (0..heads).fold(Made::default(), |weights, head| {
        let linear = |part: &str| format!("medusa_head.{head}.0.linear.{part}");
        weights.put(&linear("weight"), &[hidden, hidden], |_, _| 0.0).put(&linear("bias"), &[hidden], |_, _| 0.0)
    })
}

/// The layer attends, and the state bypasses it.
pub fn eagle(spec: &ModelSpec) -> Made {
    const INNER: usize = 64;
    let attention = &spec.layers[0].attention;
    let (hidden, q, kv) = (spec.hidden, attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim);
    let wave = |row: usize, col: usize| 0.1 * (((row * 37 + col * 101) % 199) as f32 / 99.0 - 1.0);
    let layer = |name: &str| format!("layers.0.{name}.weight");
    Made::default()
        .put("fc.weight", &[hidden, 2 * hidden], |row, col| if col == hidden + row { 1.0 } else { 0.0 })
        .put(&layer("self_attn.q_proj"), &[q, hidden], wave)
        .put(&layer("self_attn.k_proj"), &[kv, hidden], wave)
        .put(&layer("self_attn.v_proj"), &[kv, hidden], wave)
        .put(&layer("self_attn.o_proj"), &[hidden, q], wave)
        .put(&layer("mlp.gate_proj"), &[INNER, hidden], wave)
        .put(&layer("mlp.up_proj"), &[INNER, hidden], wave)
        .put(&layer("mlp.down_proj"), &[hidden, INNER], wave)
        .put(&layer("post_attention_layernorm"), &[hidden], |_, _| 1.0)
}
