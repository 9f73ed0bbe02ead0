//! AWQ: before rounding, columns that meet large activations are scaled up, so that they lose less;
//! their producer is scaled down to match, so that the network as a whole computes the same.
//!
//! For every input the scale is `mean |x|` to some power, or that over the size of the weights to
//! the complement of the power; the power is searched, and the loss of each try is exact:
//! `tr(E H E^T)` is the error that `E` adds to the outputs over all of calibration. Afterwards each
//! group's range is narrowed if clipping costs less than the finer steps gain.

mod fold;
mod search;

use folio_device::Backend;
use folio_model::{FfnSpec, LayerSites, OpenModel, SiteKind};

use crate::grid::Grid;
use crate::layer::Coded;
use crate::{Hessian, Options, Quantized, Result, Target};
use fold::{Producer, Weights};

/// Quantizes one layer. `hessians` has one per site.
pub(crate) fn code<B: Backend>(
    model: &OpenModel,
    number: usize,
    sites: &LayerSites,
    mut hessians: Vec<Hessian>,
    options: &Options,
    mut backend: B,
    step: &mut dyn FnMut(f32),
) -> Result<Coded> {
    let mut weights = Weights::read(model, sites, options)?;
    let inputs = inputs(model, number, sites);
    for (at, input) in inputs.iter().enumerate() {
        step(0.7 * at as f32 / inputs.len() as f32);
        let scales = search::scales(&mut backend, &weights, &hessians, input, options)?;
        let scales = weights.fold(model, input, scales)?;
        input.sites.iter().for_each(|site| hessians[*site].divide(&scales));
    }
    let mut coded = Coded::default();
    for (site, hessian) in hessians.iter().enumerate() {
        step(0.7 + 0.3 * site as f32 / hessians.len() as f32);
        for matrix in weights.matrices.iter().filter(|matrix| matrix.site == site) {
            if matrix.coded {
                options.target.check(&matrix.name, matrix.cols)?;
                coded.quantized.insert(matrix.name.clone(), round(&matrix.values, hessian, options));
            }
        }
    }
    coded.changed = weights.changed(model)?;
    Ok(coded)
}

/// A vector that some sites read, and its producer.
pub(crate) struct Input {
    pub sites: Vec<usize>,
    pub producer: Producer,
    /// Values that must be scaled alike: value `i` belongs to scale `ties[i]`. If empty, each value
    /// has its own scale.
    pub ties: Vec<u32>,
}

/// The inputs of a layer with scales that can be folded into their producers.
pub(crate) fn inputs(model: &OpenModel, number: usize, sites: &LayerSites) -> Vec<Input> {
    let spec = &model.spec.layers[number];
    let find = |kind| sites.sites.iter().position(|site| site.kind == kind);
    let mut inputs = Vec::new();
    let mut norm = |name: &Option<String>, sites: Vec<usize>| {
        if let Some(name) = name {
            inputs.push(Input { sites, producer: Producer::Norm(name.clone()), ties: Vec::new() });
        }
    };
    norm(&sites.norm_before_attention, find(SiteKind::Qkv).into_iter().collect());
    let reads_norm = |kind: SiteKind| {
        use SiteKind::*;
        matches!(kind, GateUp | Router | ExpertGateUp(_) | SharedGateUp | SharedSwitch)
    };
    let readers = (0..sites.sites.len()).filter(|at| reads_norm(sites.sites[*at].kind)).collect();
    norm(&sites.norm_before_ffn, readers);
    let mut rows = |from: SiteKind, first_row: usize, to: SiteKind, ties: Vec<u32>| {
        if let (Some(from), Some(to)) = (find(from), find(to)) {
            inputs.push(Input { sites: vec![to], producer: Producer::Rows { site: from, first_row }, ties });
        }
    };
    let attention = &spec.attention;
    let (q, kv) = (attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim);
    // Query heads that share a value head read the same rows of it.
    let share = attention.heads / attention.kv_heads.max(1) * attention.head_dim;
    let ties = (0..q).map(|at| (at / share * attention.head_dim + at % attention.head_dim) as u32).collect();
    rows(SiteKind::Qkv, q + kv, SiteKind::AttentionOutput, ties);
    match &spec.ffn {
        FfnSpec::Dense { inter, activation, .. } if scales_through(*activation) => {
            rows(SiteKind::GateUp, *inter, SiteKind::Down, Vec::new());
        }
        FfnSpec::Experts(experts) if scales_through(experts.activation) => {
            for expert in 0..experts.experts {
                let (from, to) = (SiteKind::ExpertGateUp(expert), SiteKind::ExpertDown(expert));
                rows(from, experts.inter, to, Vec::new());
            }
            let shared = experts.shared.as_ref().map_or(0, |shared| shared.inter);
            rows(SiteKind::SharedGateUp, shared, SiteKind::SharedDown, Vec::new());
        }
        _ => {}
    }
    inputs
}

/// Whether `gated` is linear in `up`.
fn scales_through(activation: folio_device::Activation) -> bool {
    !matches!(activation, folio_device::Activation::SwigluClamped { .. })
}

/// Rounds to nearest within ranges that lose least.
fn round(weights: &[f32], hessian: &Hessian, options: &Options) -> Quantized {
    let Options { target, threads, .. } = *options;
    let cols = hessian.size;
    let group = target.group(cols);
    let grid = if !options.awq.clip || target.rows_per_scale() > 1 {
        Grid::of_range(target, weights, cols)
    } else if group > MAX_CLIP_GROUP {
        Grid::fitted(target, weights, cols, &hessian.diagonal(), threads)
    } else {
        clipped(target, weights, hessian, threads)
    };
    grid.nearest(weights, threads)
}

/// The ranges of groups up to this size are compared with their whole part of the Hessian, those of
/// longer groups with its diagonal.
const MAX_CLIP_GROUP: usize = 256;

/// Exact losses cost more than sums of squares, so fewer ranges are tried.
const CLIP_STRIDE: usize = 2;

fn clipped(target: Target, weights: &[f32], hessian: &Hessian, threads: usize) -> Grid {
    let (cols, group) = (hessian.size, target.group(hessian.size));
    Grid::chosen(target, weights, cols, threads, |grid, _, number, values| {
        let first = number * group;
        let part = |row: usize| &hessian.values[(first + row) * cols + first..][..values.len()];
        grid.best_step(values, CLIP_STRIDE, |grid, step| {
            let mut errors = [0.0f32; MAX_CLIP_GROUP];
            let errors = &mut errors[..values.len()];
            errors.iter_mut().zip(values).for_each(|(error, value)| *error = value - grid.rounded(step, *value));
            // The matrix is symmetric: elements below the diagonal count twice.
            let below = |row: usize| 2.0 * search::dot(&errors[..row], &part(row)[..row]);
            (0..values.len()).map(|row| errors[row] * (below(row) + errors[row] * part(row)[row])).sum()
        })
    })
}

#[cfg(test)]
mod tests;
