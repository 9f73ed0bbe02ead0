//! A backend that passes every operation on to another and sums the inputs of each linear of a
//! layer.
//!
//! Linears are identified by the order of calls: one layer is loaded, so every step calls the same
//! ones in the same order, which is that of [`LayerSites`]. Experts are run one by one instead of
//! all at once, since otherwise the inputs of their second matrices never leave the backend.

use std::borrow::Borrow;
use std::marker::PhantomData;

use folio_device::reference::{self, Reference};
use folio_device::{
    Backend, Batch, BlockCopies, ExpertsSource, Handles, InputLimits, Intercept, KvShape, Memory, Op, Result, Routing,
    Sampling, StepSize, Steps, TensorKind,
};
use folio_formats::Matrix;
use folio_model::{LayerSites, SiteKind};

use crate::Hessian;
use crate::gram::{self, Gram};

pub(crate) struct Collect<B: Backend> {
    inner: B,
    gram: Gram<B>,
    /// Kind and sums of every site, in the order of [`LayerSites`].
    sums: Vec<(SiteKind, Hessian)>,
    /// Sites that are linears, in the order of calls, and the index of the next one.
    linears: Vec<usize>,
    turn: usize,
    /// The first failure: operations of a step cannot return one.
    failure: Option<crate::Error>,
    x: Vec<f32>,
    scratch: Option<ExpertScratch<B>>,
}

/// A vector that the host can read too.
pub(crate) struct Known<V> {
    inner: V,
    values: Vec<f32>,
}

impl<V> Borrow<V> for Known<V> {
    fn borrow(&self) -> &V {
        &self.inner
    }
}

/// The experts of a layer, each a pair of linears.
pub(crate) struct Singles<B: Backend, E = <B as Handles>::Experts> {
    experts: Vec<Single<B>>,
    hidden: usize,
    inter: usize,
    /// The handle that the backend would have for all of them together.
    together: PhantomData<fn() -> E>,
}

/// No operation on experts is passed on.
impl<B: Backend, E> Borrow<E> for Singles<B, E> {
    fn borrow(&self) -> &E {
        unreachable!("experts are computed one by one")
    }
}

struct Single<B: Backend> {
    gate_up: B::Weight,
    down: B::Weight,
    gate_up_bias: Option<B::Vector>,
    down_bias: Option<B::Vector>,
}

struct ExpertScratch<B: Backend> {
    rows: usize,
    x: B::Tensor,
    gate_up: B::Tensor,
    gated: B::Tensor,
    out: B::Tensor,
}

impl<B: Backend> Collect<B> {
    pub fn new(inner: B, sites: &LayerSites) -> Self {
        let sums = sites.sites.iter().map(|site| (site.kind, Hessian::new(site.linears[0].cols))).collect();
        let alone = |kind| !matches!(kind, SiteKind::ExpertGateUp(_) | SiteKind::ExpertDown(_));
        let linears = sites.sites.iter().enumerate().filter(|(_, site)| alone(site.kind)).map(|(at, _)| at);
        let linears = linears.collect();
        Self { inner, gram: Gram::default(), sums, linears, turn: 0, failure: None, x: Vec::new(), scratch: None }
    }

    /// The sums, one per site.
    pub fn finish(&mut self) -> crate::Result<Vec<Hessian>> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let mut sums: Vec<Hessian> = std::mem::take(&mut self.sums).into_iter().map(|(_, sums)| sums).collect();
        sums.iter_mut().for_each(gram::finish);
        Ok(sums)
    }

    fn add(&mut self, site: usize, rows: &[f32]) {
        if let Err(error) = self.gram.add(&mut self.inner, &mut self.sums[site].1, rows) {
            self.failure.get_or_insert(error);
        }
    }

    fn site_of(&self, kind: SiteKind) -> usize {
        let found = self.sums.iter().position(|(known, _)| *known == kind);
        found.expect("every expert has its sites")
    }
}

/// The rows of each expert, with the weight of its result for each.
fn rows_of_experts<B: Backend>(logits: &[f32], experts: usize, op: &Routing<'_, Collect<B>>) -> Vec<Vec<(usize, f32)>> {
    let bias = op.choice_bias.map(|bias| Reference::new().vector(&bias.values).expect("a few values"));
    let op = op.with_choice_bias::<Reference>(bias.as_ref());
    let mut rows = vec![Vec::new(); experts];
    for (row, logits) in logits.chunks_exact(experts).enumerate() {
        for (expert, weight) in reference::route(logits, &op) {
            rows[expert].push((row, weight as f32));
        }
    }
    rows
}

impl<B: Backend> Collect<B> {
    /// Adds the inputs of the linear that this call is for.
    fn add_linear(&mut self, x: &B::Tensor, rows: usize) {
        let site = *self.linears.get(self.turn).expect("a layer asks for the linears of its sites and no others");
        self.turn += 1;
        let mut values = std::mem::take(&mut self.x);
        self.inner.download(x, rows, &mut values);
        assert_eq!(values.len(), rows * self.sums[site].1.size, "the width of what {:?} reads", self.sums[site].0);
        self.add(site, &values);
        self.x = values;
    }

    /// Computes experts one by one, and adds the inputs of each.
    fn compute_experts(
        &mut self,
        out: &mut B::Tensor,
        x: &B::Tensor,
        router_logits: &B::Tensor,
        experts: &Singles<B>,
        op: &Routing<'_, Self>,
        rows: usize,
    ) {
        let (mut values, mut logits) = (Vec::new(), Vec::new());
        self.inner.download(x, rows, &mut values);
        self.inner.download(router_logits, rows, &mut logits);
        let scratch = match self.scratch.take() {
            Some(scratch) if scratch.rows >= rows => Ok(scratch),
            _ => ExpertScratch::new(&mut self.inner, rows, experts.hidden, experts.inter),
        };
        match scratch {
            Ok(mut scratch) => {
                let sums = self.run_experts(&values, &logits, experts, &mut scratch, op);
                self.inner.upload_rows(out, &sums);
                self.scratch = Some(scratch);
            }
            Err(error) => {
                self.failure.get_or_insert(error.into());
            }
        }
    }

    fn run_experts(
        &mut self,
        x: &[f32],
        logits: &[f32],
        experts: &Singles<B>,
        scratch: &mut ExpertScratch<B>,
        op: &Routing<'_, Self>,
    ) -> Vec<f32> {
        let hidden = experts.hidden;
        let mut sums = vec![0.0f32; x.len()];
        let mut values = Vec::new();
        let routed = rows_of_experts(logits, experts.experts.len(), op);
        for (number, (single, routed)) in experts.experts.iter().zip(routed).enumerate() {
            if routed.is_empty() {
                continue;
            }
            let rows = routed.len();
            let given: Vec<f32> =
                routed.iter().flat_map(|(row, _)| &x[row * hidden..(row + 1) * hidden]).copied().collect();
            self.add(self.site_of(SiteKind::ExpertGateUp(number)), &given);
            let ExpertScratch { x, gate_up, gated, out, .. } = scratch;
            self.inner.upload_rows(x, &given);
            self.inner.linear(gate_up, x, &single.gate_up, single.gate_up_bias.as_ref(), rows);
            self.inner.gate(gated, gate_up, op.activation, rows);
            self.inner.download(gated, rows, &mut values);
            self.add(self.site_of(SiteKind::ExpertDown(number)), &values);
            self.inner.linear(out, gated, &single.down, single.down_bias.as_ref(), rows);
            self.inner.download(out, rows, &mut values);
            for ((row, weight), values) in routed.iter().zip(values.chunks_exact(hidden)) {
                let sums = &mut sums[row * hidden..(row + 1) * hidden];
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
            }
        }
        sums
    }
}

impl<B: Backend> Handles for Collect<B> {
    type Tensor = B::Tensor;
    type Vector = Known<B::Vector>;
    type Weight = B::Weight;
    type Experts = Singles<B>;
    type Kv = B::Kv;
    type Inputs = B::Inputs;
}

impl<B: Backend> Memory for Collect<B> {
    fn tensor(&mut self, rows: usize, cols: usize, kind: TensorKind) -> Result<Self::Tensor> {
        self.inner.tensor(rows, cols, kind)
    }

    fn vector(&mut self, values: &[f32]) -> Result<Self::Vector> {
        Ok(Known { inner: self.inner.vector(values)?, values: values.to_vec() })
    }

    fn weight(&mut self, matrix: &Matrix<'_>) -> Result<Self::Weight> {
        self.inner.weight(matrix)
    }

    fn experts(&mut self, source: ExpertsSource<'_>) -> Result<Self::Experts> {
        let (hidden, inter) = source.down.first().map_or((0, 0), |down| (down.num_rows(), down.cols()));
        let mut experts = Vec::with_capacity(source.down.len());
        for (number, (gate_up, down)) in source.gate_up.iter().zip(&source.down).enumerate() {
            let mut bias =
                |all: &Option<Vec<Vec<f32>>>| all.as_ref().map(|biases| self.inner.vector(&biases[number])).transpose();
            let (gate_up_bias, down_bias) = (bias(&source.gate_up_bias)?, bias(&source.down_bias)?);
            let (gate_up, down) = (self.inner.weight(gate_up)?, self.inner.weight(down)?);
            experts.push(Single { gate_up, down, gate_up_bias, down_bias });
        }
        Ok(Singles { experts, hidden, inter, together: PhantomData })
    }

    fn kv(&mut self, shape: KvShape) -> Result<Self::Kv> {
        self.inner.kv(shape)
    }

    fn inputs(&mut self, limits: InputLimits) -> Result<Self::Inputs> {
        self.inner.inputs(limits)
    }

    fn weight_bytes(&self, weight: &Self::Weight) -> u64 {
        self.inner.weight_bytes(weight)
    }

    fn experts_bytes(&self, experts: &Self::Experts) -> u64 {
        let bytes =
            |single: &Single<B>| self.inner.weight_bytes(&single.gate_up) + self.inner.weight_bytes(&single.down);
        experts.experts.iter().map(bytes).sum()
    }
}

impl<B: Backend> Intercept for Collect<B> {
    fn intercept(&mut self, op: Op<'_, Self>) {
        match op {
            Op::Linear { x, rows, .. } => {
                self.add_linear(x, rows);
                op.inner().run(&mut self.inner);
            }
            Op::ExpertsForward { out, x, router_logits, experts, op, rows } => {
                self.compute_experts(out, x, router_logits, experts, &op, rows);
            }
            op => op.inner().run(&mut self.inner),
        }
    }
}

impl<B: Backend> Steps for Collect<B> {
    fn numerics(&self) -> String {
        self.inner.numerics()
    }

    fn upload(&mut self, inputs: &mut Self::Inputs, batch: &Batch) -> StepSize {
        self.turn = 0;
        // Padding rows would be counted, so operations are asked for the batch's own rows alone.
        self.inner.upload(inputs, batch);
        StepSize::of(batch)
    }

    fn check(&mut self) -> Result<()> {
        self.inner.check()
    }
}

impl<B: Backend> Sampling for Collect<B> {}

impl<B: Backend> BlockCopies for Collect<B> {}

impl<B: Backend> ExpertScratch<B> {
    fn new(backend: &mut B, rows: usize, hidden: usize, inter: usize) -> Result<Self> {
        Ok(Self {
            rows,
            x: backend.tensor(rows, hidden, TensorKind::Activation)?,
            gate_up: backend.tensor(rows, 2 * inter, TensorKind::Activation)?,
            gated: backend.tensor(rows, inter, TensorKind::Activation)?,
            out: backend.tensor(rows, hidden, TensorKind::Activation)?,
        })
    }
}
