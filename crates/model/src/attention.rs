//! One layer's attention: fused query, key and value rows, norms and rotation, paged attention,
//! output.

use folio_device::{Attention, Backend, PrepareQkv};
use folio_formats::Matrix;

use crate::{
    AttentionSpec, LayerSpec, Names, Result,
    activations::Activations,
    linear::{Linear, LinearShape, Source},
    load::{Loader, Place},
    names::Part,
};

pub(crate) struct AttentionLayer<B: Backend> {
    spec: AttentionSpec,
    eps: f32,
    /// Layer group, and this layer's index in it.
    group: usize,
    slot: usize,
    qkv: Linear<B>,
    output: Linear<B>,
    q_norm: Option<B::Vector>,
    k_norm: Option<B::Vector>,
    sinks: Option<B::Vector>,
}

/// The paged storage that a layer writes to.
#[derive(Clone, Copy)]
pub(crate) struct KvPlace {
    pub group: usize,
    pub slot: usize,
}

impl AttentionSpec {
    pub(crate) fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    pub(crate) fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    pub(crate) fn qkv_width(&self) -> usize {
        self.q_width() + 2 * self.kv_width()
    }
}

impl<B: Backend> AttentionLayer<B> {
    pub fn load(
        backend: &mut B,
        loader: &Loader<'_>,
        place: Place,
        layer: &LayerSpec,
        hidden: usize,
        eps: f32,
        kv: KvPlace,
    ) -> Result<Self> {
        let spec = layer.attention.clone();
        let (matrix, bias) = fused_qkv(loader, place, &spec, hidden)?;
        let output =
            LinearShape { part: Part::Output, outputs: hidden, inputs: spec.q_width(), bias: spec.output_bias };
        let widths = spec.qk_norm.map(|span| match span {
            folio_device::NormSpan::Head => (spec.head_dim, spec.head_dim),
            folio_device::NormSpan::Row => (spec.q_width(), spec.kv_width()),
        });
        let (q_norm, k_norm) = match widths {
            Some((q, k)) => {
                let (q, k) = (loader.norm(Part::QueryNorm, place, q)?, loader.norm(Part::KeyNorm, place, k)?);
                (Some(backend.vector(&q)?), Some(backend.vector(&k)?))
            }
            None => (None, None),
        };
        let sinks = match spec.sinks {
            true => Some(backend.vector(&loader.plain_vector(Part::Sinks, place, spec.heads)?)?),
            false => None,
        };
        Ok(Self {
            eps,
            group: kv.group,
            slot: kv.slot,
            qkv: Linear::new(backend, &matrix, bias.as_deref())?,
            output: Linear::load(backend, loader, place, output)?,
            q_norm,
            k_norm,
            sinks,
            spec,
        })
    }

    /// Writes to `branch`, or adds to the residual stream with this scale.
    #[expect(clippy::too_many_arguments)]
    pub fn forward(
        &self,
        backend: &mut B,
        acts: &mut Activations<B>,
        kv: &mut [B::Kv],
        inputs: &B::Inputs,
        source: Source<'_, B>,
        added: Option<f32>,
        rows: usize,
    ) {
        let spec = &self.spec;
        let qkv = acts.qkv.of_width(spec.qkv_width());
        match source {
            Source::Stream => self.qkv.forward(backend, qkv, &acts.residual, rows),
            Source::Normed => self.qkv.forward(backend, qkv, &acts.normed, rows),
            Source::Norm(norm) => {
                backend.norm_linear(qkv, &mut acts.normed, &acts.residual, norm, self.qkv.product(), rows);
            }
        }
        let prepare = PrepareQkv {
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            group: self.group,
            rope: spec.rope,
            q_norm: self.q_norm.as_ref(),
            k_norm: self.k_norm.as_ref(),
            norm_span: spec.qk_norm.unwrap_or(folio_device::NormSpan::Head),
            eps: self.eps,
        };
        backend.prepare_qkv(qkv, &mut kv[self.group], self.slot, prepare, inputs);
        let attention = Attention {
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            group: self.group,
            scale: spec.scale,
            window: spec.window,
            soft_cap: spec.soft_cap,
            sinks: self.sinks.as_ref(),
        };
        let attended = acts.attended.of_width(spec.q_width());
        backend.fetch_ahead(self.output.product().weight);
        backend.attention(attended, qkv, &kv[self.group], self.slot, attention, inputs);
        match added {
            Some(scale) => {
                let product = self.output.product();
                backend.linear_add(&mut acts.residual, &mut acts.branch, attended, product, scale, rows);
            }
            None => self.output.forward(backend, &mut acts.branch, attended, rows),
        }
    }

    pub fn bytes(&self, backend: &B) -> u64 {
        self.qkv.bytes(backend) + self.output.bytes(backend)
    }
}

/// Query rows above key rows above value rows, for any split in the checkpoint.
fn fused_qkv<'a>(
    loader: &Loader<'a>,
    place: Place,
    spec: &AttentionSpec,
    hidden: usize,
) -> Result<(Matrix<'a>, Option<Vec<f32>>)> {
    if loader.has(Part::Qkv, place) {
        let matrix = loader.matrix(Part::Qkv, place, spec.qkv_width(), hidden)?;
        let bias = spec.qkv_bias.then(|| loader.bias(Part::Qkv, place, spec.qkv_width())).transpose()?;
        return Ok((matrix, bias));
    }
    let permuted = matches!(loader.names(), Names::Gguf { permuted: true });
    let mut matrices = Vec::with_capacity(3);
    let mut biases = Vec::new();
    for (part, heads) in [(Part::Query, spec.heads), (Part::Key, spec.kv_heads), (Part::Value, spec.kv_heads)] {
        let width = heads * spec.head_dim;
        let matrix = loader.matrix(part, place, width, hidden)?;
        let reorder = permuted && part != Part::Value;
        matrices.push(if reorder { matrix.pick_rows(halves_order(heads, spec.head_dim)) } else { matrix });
        if spec.qkv_bias {
            let bias = loader.bias(part, place, width)?;
            match reorder {
                true => biases.extend(halves_order(heads, spec.head_dim).map(|row| bias[row])),
                false => biases.extend(bias),
            }
        }
    }
    Ok((Matrix::stack(matrices)?, spec.qkv_bias.then_some(biases)))
}

/// Reorders rows from adjacent rotation pairs to halves: value `i` of a head pairs with value
/// `i + head_dim / 2`.
fn halves_order(heads: usize, head_dim: usize) -> impl Iterator<Item = usize> {
    let half = head_dim / 2;
    (0..heads * head_dim).map(move |row| {
        let (head, value) = (row / head_dim, row % head_dim);
        head * head_dim + 2 * (value % half) + value / half
    })
}

#[cfg(test)]
mod tests {
    use super::halves_order;

    #[test]
    fn adjacent_pairs_become_halves() {
        let order: Vec<_> = halves_order(2, 6).collect();
        assert_eq!(order, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    }
}
