//! Layout, sizes and vocabulary of an EAGLE head, derived from its tensors.

use super::EagleLayout;
use crate::heads::layer::LayerShape;
use crate::heads::stored::Stored;
use crate::{AttentionSpec, Error, ModelSpec, Result, Tap};

pub(super) const FAMILY: &str = "an EAGLE head";

pub(super) struct Sizes {
    pub layout: EagleLayout,
    /// In front of `fc` and `norm`.
    prefix: &'static str,
    /// In front of the layer's names.
    pub layer: String,
    /// Columns of `fc`.
    pub fused: usize,
    /// Width of a row of logits.
    pub vocab: usize,
    pub output: Output,
    /// Token of each draft id; empty if they are the same.
    pub tokens: Vec<u32>,
    pub tap: Tap,
    /// The decoder's layer group without a window, which frees no blocks while a sequence runs, and
    /// its kind of attention.
    pub group: usize,
    pub like: AttentionSpec,
}

/// The output matrix of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Output {
    /// The head's file has an output matrix.
    Own,
    /// The decoder's rows of the draft vocabulary's tokens.
    Borrowed,
    /// The head uses the decoder's output matrix.
    Decoders,
}

impl Sizes {
    pub fn of(stored: &Stored<'_>, spec: &ModelSpec) -> Result<Self> {
        let prefix = if stored.has("model.fc.weight") { "model." } else { "" };
        let named = |layer: &str| stored.has(&format!("{layer}self_attn.q_proj.weight"));
        let layers = ["midlayer.".to_owned(), format!("{prefix}midlayer."), format!("{prefix}layers.0.")];
        let [usual, _, last] = &layers;
        let layer = layers.iter().find(|layer| named(layer)).unwrap_or(if prefix.is_empty() { usual } else { last });
        let layer = layer.clone();
        let layout = match stored.has(&format!("{layer}hidden_norm.weight")) || layer.contains("midlayer") {
            true => EagleLayout::Three,
            false => EagleLayout::One,
        };
        let (group, like) = group_of(spec)?;
        let three = layout == EagleLayout::Three;
        let output = match three {
            true if stored.has("lm_head.weight") => Output::Own,
            true if stored.has("d2t") => Output::Borrowed,
            _ => Output::Decoders,
        };
        let vocab = match output {
            Output::Own => stored.outputs("lm_head.weight")?,
            Output::Borrowed => stored.outputs("d2t")?,
            Output::Decoders => spec.vocab_size,
        };
        if output == Output::Borrowed && !spec.tied_head {
            // Rows are read back through the embedding, but this decoder's output matrix is another
            // table.
            return Err(stored.missing("lm_head.weight", &[vocab, spec.hidden]));
        }
        let is_narrow = output != Output::Decoders;
        Ok(Self {
            layout,
            prefix,
            layer,
            fused: if three { 3 * spec.hidden } else { 2 * spec.hidden },
            vocab,
            output,
            tokens: if is_narrow { vocabulary(stored, spec.vocab_size, vocab)? } else { Vec::new() },
            tap: if three { Tap::Before(fused_layers(spec.layers.len())?.to_vec()) } else { Tap::Final },
            group,
            like,
        })
    }

    pub fn stem(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub fn layer_shape(&self, spec: &ModelSpec) -> LayerShape<'_> {
        let (prefix, hidden, eps) = (&self.layer[..], spec.hidden, spec.norm_eps);
        let inputs = if self.layout == EagleLayout::Three { 2 * hidden } else { hidden };
        LayerShape { prefix, hidden, inputs, eps, like: &self.like }
    }
}

/// The layers before which EAGLE-3 takes its three states.
fn fused_layers(layers: usize) -> Result<[usize; 3]> {
    match layers >= 7 {
        true => Ok([2, layers / 2, layers - 3]),
        false => Err(Error::BatchShape { what: "a decoder for an EAGLE-3 head", found: layers, expected: 7 }),
    }
}

/// The first group without a window, and one of its layers.
fn group_of(spec: &ModelSpec) -> Result<(usize, AttentionSpec)> {
    let groups = spec.kv_groups();
    let found = groups.iter().position(|group| group.window.is_none());
    let number = found.ok_or(Error::BatchShape { what: "layer groups without a window", found: 0, expected: 1 })?;
    Ok((number, spec.layers[groups[number].layers[0]].attention.clone()))
}

/// `d2t` holds the difference between a token and its draft id.
fn vocabulary(stored: &Stored<'_>, tokens: usize, drafts: usize) -> Result<Vec<u32>> {
    if !stored.has("d2t") {
        return match drafts == tokens {
            true => Ok(Vec::new()),
            false => Err(stored.shape_error("lm_head.weight", &[tokens], &[drafts])),
        };
    }
    let token = |(id, add): (usize, i64)| {
        let token = (id as i64).checked_add(add).filter(|token| (0..tokens as i64).contains(token));
        token.map(|token| token as u32)
    };
    let all: Option<Vec<u32>> = stored.integers("d2t", drafts)?.into_iter().enumerate().map(token).collect();
    let outside = || {
        let (name, found) = ("d2t".to_owned(), "numbers that lead outside the vocabulary".to_owned());
        Error::TensorFormat { name, family: FAMILY, expected: "what to add to draft ids", found }
    };
    all.ok_or_else(outside)
}

#[cfg(test)]
mod tests {
    use super::fused_layers;

    #[test]
    fn three_layers_are_tapped() {
        assert_eq!(fused_layers(30).ok(), Some([2, 15, 27]));
        assert_eq!(fused_layers(7).ok(), Some([2, 3, 4]));
        assert!(fused_layers(6).is_err());
    }
}
