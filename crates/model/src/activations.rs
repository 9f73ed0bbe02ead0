//! All memory of a step, allocated once at load: a step allocates nothing and always uses the same
//! addresses.

use folio_device::{Backend, TensorKind};

use crate::{DecoderLimits, FfnSpec, ModelSpec, Result};

pub(crate) struct Activations<B: Backend> {
    /// The residual stream. [rows, hidden]
    pub residual: B::Tensor,
    /// Normalized input of a sub-layer. [rows, hidden]
    pub normed: B::Tensor,
    /// Output of a sub-layer. [rows, hidden]
    pub branch: B::Tensor,
    /// The branch after its own norm; only for models with such a norm. [rows, hidden]
    pub post: Option<B::Tensor>,
    pub qkv: ByWidth<B>,
    pub attended: ByWidth<B>,
    pub gate_up: ByWidth<B>,
    pub gated: ByWidth<B>,
    pub router: ByWidth<B>,
    /// A shared expert's result, [rows, hidden], and its switch, [rows, 1].
    pub shared: Option<B::Tensor>,
    pub shared_switch: Option<B::Tensor>,
    /// The rows with requested logits, before and after the last norm. [outputs, hidden]
    pub picked: B::Tensor,
    pub picked_normed: B::Tensor,
    /// Logits of the output rows. [outputs, vocab]
    pub logits: B::Tensor,
}

/// Tensors of the few widths that a model's layers have.
pub(crate) struct ByWidth<B: Backend>(Vec<(usize, B::Tensor)>);

impl<B: Backend> ByWidth<B> {
    fn new(backend: &mut B, rows: usize, widths: &[usize], kind: TensorKind) -> Result<Self> {
        let tensors = widths.iter().map(|&width| Ok((width, backend.tensor(rows, width, kind)?)));
        Ok(Self(tensors.collect::<Result<_>>()?))
    }

    pub fn of_width(&mut self, width: usize) -> &mut B::Tensor {
        let found = self.0.iter_mut().find(|(have, _)| *have == width);
        &mut found.expect("every layer's width was listed at load").1
    }
}

/// The distinct widths of each kind of tensor.
#[derive(Default)]
pub(crate) struct Widths {
    pub qkv: Vec<usize>,
    pub attended: Vec<usize>,
    pub gate_up: Vec<usize>,
    pub gated: Vec<usize>,
    pub router: Vec<usize>,
    pub after_norm: bool,
    pub shared: bool,
}

impl Widths {
    pub fn of(spec: &ModelSpec) -> Self {
        let mut widths = Self::default();
        let note = |list: &mut Vec<usize>, width| {
            if !list.contains(&width) {
                list.push(width);
            }
        };
        for layer in &spec.layers {
            note(&mut widths.qkv, layer.attention.qkv_width());
            note(&mut widths.attended, layer.attention.q_width());
            widths.after_norm |= layer.norms.after_attention || layer.norms.after_ffn;
            let dense = match &layer.ffn {
                FfnSpec::Dense { inter, .. } => Some(*inter),
                FfnSpec::Experts(experts) => {
                    note(&mut widths.router, experts.experts);
                    widths.shared |= experts.shared.is_some();
                    experts.shared.as_ref().map(|shared| shared.inter)
                }
            };
            if let Some(inter) = dense {
                note(&mut widths.gate_up, 2 * inter);
                note(&mut widths.gated, inter);
            }
        }
        widths
    }

    /// Bytes per row of all tensors with one row per token, if a value of each kind takes `value`
    /// bytes.
    pub fn row_bytes(&self, hidden: usize, value: impl Fn(TensorKind) -> usize) -> usize {
        let sum = |list: &Vec<usize>| list.iter().sum::<usize>();
        let listed = sum(&self.qkv) + sum(&self.attended) + sum(&self.gate_up) + sum(&self.gated);
        // Normalized rows and branches; in some models the normalized branch, and a shared expert's
        // result.
        let hidden_rows = 2 + usize::from(self.after_norm) + usize::from(self.shared);
        let scores = sum(&self.router) + usize::from(self.shared);
        value(TensorKind::Stream) * hidden
            + value(TensorKind::Activation) * (listed + hidden_rows * hidden)
            + value(TensorKind::Scores) * scores
    }
}

impl<B: Backend> Activations<B> {
    pub fn new(backend: &mut B, spec: &ModelSpec, limits: &DecoderLimits) -> Result<Self> {
        use TensorKind::{Activation, Scores, Stream};
        let widths = Widths::of(spec);
        let (rows, hidden, outputs) = (limits.rows, spec.hidden, limits.outputs);
        let optional = |backend: &mut B, wanted: bool, width, kind| -> Result<Option<B::Tensor>> {
            Ok(if wanted { Some(backend.tensor(rows, width, kind)?) } else { None })
        };
        Ok(Self {
            residual: backend.tensor(rows, hidden, Stream)?,
            normed: backend.tensor(rows, hidden, Activation)?,
            branch: backend.tensor(rows, hidden, Activation)?,
            post: optional(backend, widths.after_norm, hidden, Activation)?,
            qkv: ByWidth::new(backend, rows, &widths.qkv, Activation)?,
            attended: ByWidth::new(backend, rows, &widths.attended, Activation)?,
            gate_up: ByWidth::new(backend, rows, &widths.gate_up, Activation)?,
            gated: ByWidth::new(backend, rows, &widths.gated, Activation)?,
            router: ByWidth::new(backend, rows, &widths.router, Scores)?,
            shared: optional(backend, widths.shared, hidden, Activation)?,
            shared_switch: optional(backend, widths.shared, 1, Scores)?,
            picked: backend.tensor(outputs, hidden, Stream)?,
            picked_normed: backend.tensor(outputs, hidden, Activation)?,
            logits: backend.tensor(outputs, spec.vocab_size, Scores)?,
        })
    }
}
