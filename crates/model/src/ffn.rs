//! One layer's feed-forward half: a gated dense block, or routed experts, in some models with a
//! shared one beside them.

use folio_device::{Activation, Backend, Routing};
use folio_formats::Matrix;

use crate::{
    ExpertsSpec, FfnSpec, LayerSpec, Result,
    activations::Activations,
    experts,
    linear::{Linear, LinearShape, Source},
    load::{Loader, Place},
    names::Part,
};

pub(crate) enum FfnLayer<B: Backend> {
    Dense(Dense<B>),
    Experts(Box<ExpertsLayer<B>>),
}

pub(crate) struct Dense<B: Backend> {
    inter: usize,
    activation: Activation,
    gate_up: Linear<B>,
    down: Linear<B>,
}

pub(crate) struct ExpertsLayer<B: Backend> {
    spec: ExpertsSpec,
    router: Linear<B>,
    choice_bias: Option<B::Vector>,
    experts: B::Experts,
    shared: Option<Shared<B>>,
}

struct Shared<B: Backend> {
    dense: Dense<B>,
    switch: Option<Linear<B>>,
}

/// Names of a dense block's matrices.
#[derive(Clone, Copy)]
struct DenseParts {
    gate: Part,
    up: Part,
    /// Gate and up in one matrix; shared experts have no such form.
    gate_up: Option<Part>,
    down: Part,
}

const DENSE: DenseParts = DenseParts { gate: Part::Gate, up: Part::Up, gate_up: Some(Part::GateUp), down: Part::Down };
const SHARED: DenseParts =
    DenseParts { gate: Part::SharedGate, up: Part::SharedUp, gate_up: None, down: Part::SharedDown };

impl<B: Backend> FfnLayer<B> {
    pub fn load(backend: &mut B, loader: &Loader<'_>, place: Place, layer: &LayerSpec, hidden: usize) -> Result<Self> {
        match &layer.ffn {
            FfnSpec::Dense { inter, activation, bias } => {
                let shape = DenseShape { inter: *inter, hidden, activation: *activation, bias: *bias };
                Ok(FfnLayer::Dense(Dense::load(backend, loader, place, DENSE, shape)?))
            }
            FfnSpec::Experts(spec) => {
                Ok(FfnLayer::Experts(Box::new(ExpertsLayer::load(backend, loader, place, spec, hidden)?)))
            }
        }
    }

    /// Whether its products may normalize their input and add their output.
    pub fn is_dense(&self) -> bool {
        matches!(self, FfnLayer::Dense(_))
    }

    /// Writes to `branch`, or adds to the residual stream with this scale.
    pub fn forward(
        &self,
        backend: &mut B,
        acts: &mut Activations<B>,
        source: Source<'_, B>,
        added: Option<f32>,
        rows: usize,
    ) {
        match self {
            FfnLayer::Dense(dense) => dense.forward_layer(backend, acts, source, added, rows),
            FfnLayer::Experts(layer) => {
                assert!(added.is_none(), "experts give a branch");
                match source {
                    Source::Stream => layer.forward(backend, acts, false, rows),
                    Source::Normed => layer.forward(backend, acts, true, rows),
                    Source::Norm(_) => unreachable!("experts read what is normed already"),
                }
            }
        }
    }

    pub fn bytes(&self, backend: &B) -> u64 {
        match self {
            FfnLayer::Dense(dense) => dense.bytes(backend),
            FfnLayer::Experts(layer) => {
                let shared = layer.shared.as_ref().map_or(0, |shared| {
                    shared.dense.bytes(backend) + shared.switch.as_ref().map_or(0, |switch| switch.bytes(backend))
                });
                layer.router.bytes(backend) + backend.experts_bytes(&layer.experts) + shared
            }
        }
    }
}

#[derive(Clone, Copy)]
struct DenseShape {
    inter: usize,
    hidden: usize,
    activation: Activation,
    bias: bool,
}

impl<B: Backend> Dense<B> {
    fn load(backend: &mut B, loader: &Loader<'_>, place: Place, parts: DenseParts, shape: DenseShape) -> Result<Self> {
        let DenseShape { inter, hidden, activation, bias } = shape;
        let fused = parts.gate_up.filter(|part| !loader.has(parts.gate, place) && loader.has(*part, place));
        let gate_up = match fused {
            Some(part) => {
                Linear::load(backend, loader, place, LinearShape { part, outputs: 2 * inter, inputs: hidden, bias })?
            }
            None => {
                let gate = loader.matrix(parts.gate, place, inter, hidden)?;
                let up = loader.matrix(parts.up, place, inter, hidden)?;
                let mut values = Vec::new();
                if bias {
                    values = loader.bias(parts.gate, place, inter)?;
                    values.extend(loader.bias(parts.up, place, inter)?);
                }
                Linear::new(backend, &Matrix::stack(vec![gate, up])?, bias.then_some(&values))?
            }
        };
        let down = LinearShape { part: parts.down, outputs: hidden, inputs: inter, bias };
        Ok(Self { inter, activation, gate_up, down: Linear::load(backend, loader, place, down)? })
    }

    fn forward_layer(
        &self,
        backend: &mut B,
        acts: &mut Activations<B>,
        source: Source<'_, B>,
        added: Option<f32>,
        rows: usize,
    ) {
        let gate_up = acts.gate_up.of_width(2 * self.inter);
        let gated = acts.gated.of_width(self.inter);
        let x = match source {
            Source::Stream => Some(&acts.residual),
            Source::Normed => Some(&acts.normed),
            Source::Norm(norm) => {
                let (product, activation) = (self.gate_up.product(), self.activation);
                let (normed, x) = (&mut acts.normed, &acts.residual);
                backend.norm_linear_gated(gated, gate_up, normed, x, norm, product, activation, rows);
                None
            }
        };
        if let Some(x) = x {
            backend.linear_gated(gated, gate_up, x, self.gate_up.product(), self.activation, rows);
        }
        match added {
            Some(scale) => {
                let product = self.down.product();
                backend.linear_add(&mut acts.residual, &mut acts.branch, gated, product, scale, rows);
            }
            None => self.down.forward(backend, &mut acts.branch, gated, rows),
        }
    }

    fn forward(
        &self,
        backend: &mut B,
        out: &mut B::Tensor,
        x: &B::Tensor,
        gate_up: &mut B::Tensor,
        gated: &mut B::Tensor,
        rows: usize,
    ) {
        backend.linear_gated(gated, gate_up, x, self.gate_up.product(), self.activation, rows);
        self.down.forward(backend, out, gated, rows);
    }

    fn bytes(&self, backend: &B) -> u64 {
        self.gate_up.bytes(backend) + self.down.bytes(backend)
    }
}

impl<B: Backend> ExpertsLayer<B> {
    fn load(backend: &mut B, loader: &Loader<'_>, place: Place, spec: &ExpertsSpec, hidden: usize) -> Result<Self> {
        let router = LinearShape { part: Part::Router, outputs: spec.experts, inputs: hidden, bias: spec.router_bias };
        let choice_bias = match spec.choice_bias {
            true => Some(backend.vector(&loader.plain_vector(Part::RouterChoice, place, spec.experts)?)?),
            false => None,
        };
        let source = experts::source(loader, place, spec, hidden)?;
        let shared = match &spec.shared {
            Some(shared) => {
                let shape = DenseShape { inter: shared.inter, hidden, activation: spec.activation, bias: false };
                let switch = LinearShape { part: Part::SharedSwitch, outputs: 1, inputs: hidden, bias: false };
                let switch = shared.gated.then(|| Linear::load(backend, loader, place, switch)).transpose()?;
                Some(Shared { dense: Dense::load(backend, loader, place, SHARED, shape)?, switch })
            }
            None => None,
        };
        Ok(Self {
            spec: spec.clone(),
            router: Linear::load(backend, loader, place, router)?,
            choice_bias,
            experts: backend.experts(source)?,
            shared,
        })
    }

    fn forward(&self, backend: &mut B, acts: &mut Activations<B>, normed: bool, rows: usize) {
        let x = if normed { &acts.normed } else { &acts.residual };
        let logits = acts.router.of_width(self.router.outputs);
        self.router.forward(backend, logits, x, rows);
        let routing = Routing {
            score: self.spec.score,
            top_k: self.spec.top_k,
            normalize: self.spec.normalize,
            scale: self.spec.scale,
            choice_bias: self.choice_bias.as_ref(),
            groups: self.spec.groups,
            groups_kept: self.spec.groups_kept,
            activation: self.spec.activation,
        };
        backend.experts_forward(&mut acts.branch, x, logits, &self.experts, routing, rows);
        let (Some(shared), Some(out)) = (&self.shared, &mut acts.shared) else { return };
        let gate_up = acts.gate_up.of_width(2 * shared.dense.inter);
        let gated = acts.gated.of_width(shared.dense.inter);
        shared.dense.forward(backend, out, x, gate_up, gated, rows);
        match (&shared.switch, &mut acts.shared_switch) {
            (Some(linear), Some(switch)) => {
                linear.forward(backend, switch, x, rows);
                backend.add_gated(&mut acts.branch, out, switch, rows);
            }
            _ => backend.add(&mut acts.branch, out, 1.0, rows),
        }
    }
}
