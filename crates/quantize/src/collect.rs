//! A backend that passes every operation on to another and sums the inputs of each linear of a
//! layer.
//!
//! Linears are identified by the order of calls: one layer is loaded, so every step calls the same
//! ones in the same order, which is that of [`LayerSites`]. Experts are run one by one instead of
//! all at once, since otherwise the inputs of their second matrices never leave the backend.

use folio_device::reference::{self, Reference};
use folio_device::{
    Activation, Attention, Backend, Batch, ExpertsSource, InputLimits, KvShape, PrepareQkv, Result, Routing, StepSize,
    TensorKind,
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

/// The experts of a layer, each a pair of linears.
pub(crate) struct Singles<B: Backend> {
    experts: Vec<Single<B>>,
    hidden: usize,
    inter: usize,
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
    let op = Routing::<Reference> {
        score: op.score,
        top_k: op.top_k,
        normalize: op.normalize,
        scale: op.scale,
        choice_bias: bias.as_ref(),
        groups: op.groups,
        groups_kept: op.groups_kept,
        activation: op.activation,
    };
    let mut rows = vec![Vec::new(); experts];
    for (row, logits) in logits.chunks_exact(experts).enumerate() {
        for (expert, weight) in reference::route(logits, &op) {
            rows[expert].push((row, weight as f32));
        }
    }
    rows
}

impl<B: Backend> Collect<B> {
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

impl<B: Backend> Backend for Collect<B> {
    type Tensor = B::Tensor;
    type Vector = Known<B::Vector>;
    type Weight = B::Weight;
    type Experts = Singles<B>;
    type Kv = B::Kv;
    type Inputs = B::Inputs;

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
        Ok(Singles { experts, hidden, inter })
    }

    fn kv(&mut self, shape: KvShape) -> Result<Self::Kv> {
        self.inner.kv(shape)
    }

    fn inputs(&mut self, limits: InputLimits) -> Result<Self::Inputs> {
        self.inner.inputs(limits)
    }

    fn numerics(&self) -> String {
        self.inner.numerics()
    }

    fn weight_bytes(&self, weight: &Self::Weight) -> u64 {
        self.inner.weight_bytes(weight)
    }

    fn experts_bytes(&self, experts: &Self::Experts) -> u64 {
        let bytes =
            |single: &Single<B>| self.inner.weight_bytes(&single.gate_up) + self.inner.weight_bytes(&single.down);
        experts.experts.iter().map(bytes).sum()
    }

    fn upload(&mut self, inputs: &mut Self::Inputs, batch: &Batch) -> StepSize {
        self.turn = 0;
        // Rows that a device adds would be counted, so its operations are asked for the batch's own
        // alone.
        self.inner.upload(inputs, batch);
        StepSize::of(batch)
    }

    fn check(&mut self) -> Result<()> {
        self.inner.check()
    }

    fn rope_angles(&mut self, inputs: &mut Self::Inputs, rope: usize, inv_freq: &Self::Vector, magnitude: f32) {
        self.inner.rope_angles(inputs, rope, &inv_freq.inner, magnitude);
    }

    fn embed(&mut self, out: &mut Self::Tensor, table: &Self::Weight, inputs: &Self::Inputs, scale: f32) {
        self.inner.embed(out, table, inputs, scale);
    }

    fn rms_norm(&mut self, out: &mut Self::Tensor, x: &Self::Tensor, weight: &Self::Vector, eps: f32, rows: usize) {
        self.inner.rms_norm(out, x, &weight.inner, eps, rows);
    }

    fn add(&mut self, residual: &mut Self::Tensor, x: &Self::Tensor, scale: f32, rows: usize) {
        self.inner.add(residual, x, scale, rows);
    }

    fn add_rms_norm(
        &mut self,
        out: &mut Self::Tensor,
        residual: &mut Self::Tensor,
        x: &Self::Tensor,
        scale: f32,
        weight: &Self::Vector,
        eps: f32,
        rows: usize,
    ) {
        self.inner.add_rms_norm(out, residual, x, scale, &weight.inner, eps, rows);
    }

    fn linear(
        &mut self,
        out: &mut Self::Tensor,
        x: &Self::Tensor,
        weight: &Self::Weight,
        bias: Option<&Self::Vector>,
        rows: usize,
    ) {
        let site = *self.linears.get(self.turn).expect("a layer asks for the linears of its sites and no others");
        self.turn += 1;
        let mut values = std::mem::take(&mut self.x);
        self.inner.download(x, rows, &mut values);
        assert_eq!(values.len(), rows * self.sums[site].1.size, "the width of what {:?} reads", self.sums[site].0);
        self.add(site, &values);
        self.x = values;
        self.inner.linear(out, x, weight, bias.map(|bias| &bias.inner), rows);
    }

    fn prepare_qkv(
        &mut self,
        qkv: &mut Self::Tensor,
        kv: &mut Self::Kv,
        layer: usize,
        op: &PrepareQkv<'_, Self>,
        inputs: &Self::Inputs,
    ) {
        let op = PrepareQkv {
            heads: op.heads,
            kv_heads: op.kv_heads,
            head_dim: op.head_dim,
            group: op.group,
            rope: op.rope,
            q_norm: op.q_norm.map(|norm| &norm.inner),
            k_norm: op.k_norm.map(|norm| &norm.inner),
            norm_span: op.norm_span,
            eps: op.eps,
        };
        self.inner.prepare_qkv(qkv, kv, layer, &op, inputs);
    }

    fn attention(
        &mut self,
        out: &mut Self::Tensor,
        qkv: &Self::Tensor,
        kv: &Self::Kv,
        layer: usize,
        op: &Attention<'_, Self>,
        inputs: &Self::Inputs,
    ) {
        let op = Attention {
            heads: op.heads,
            kv_heads: op.kv_heads,
            head_dim: op.head_dim,
            group: op.group,
            scale: op.scale,
            window: op.window,
            soft_cap: op.soft_cap,
            sinks: op.sinks.map(|sinks| &sinks.inner),
        };
        self.inner.attention(out, qkv, kv, layer, &op, inputs);
    }

    fn gate(&mut self, out: &mut Self::Tensor, gate_up: &Self::Tensor, activation: Activation, rows: usize) {
        self.inner.gate(out, gate_up, activation, rows);
    }

    fn experts_forward(
        &mut self,
        out: &mut Self::Tensor,
        x: &Self::Tensor,
        router_logits: &Self::Tensor,
        experts: &Self::Experts,
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

    fn add_gated(&mut self, out: &mut Self::Tensor, x: &Self::Tensor, gate: &Self::Tensor, rows: usize) {
        self.inner.add_gated(out, x, gate, rows);
    }

    fn gather_outputs(&mut self, out: &mut Self::Tensor, x: &Self::Tensor, inputs: &Self::Inputs) {
        self.inner.gather_outputs(out, x, inputs);
    }

    fn finish_logits(&mut self, logits: &mut Self::Tensor, scale: f32, soft_cap: Option<f32>, rows: usize) {
        self.inner.finish_logits(logits, scale, soft_cap, rows);
    }

    fn copy_blocks(&mut self, kv: &mut Self::Kv, pairs: &[(u32, u32)]) {
        self.inner.copy_blocks(kv, pairs);
    }

    fn move_tokens(&mut self, kv: &mut Self::Kv, pairs: &[(u32, u32)]) {
        self.inner.move_tokens(kv, pairs);
    }

    fn upload_rows(&mut self, tensor: &mut Self::Tensor, values: &[f32]) {
        self.inner.upload_rows(tensor, values);
    }

    fn download(&mut self, tensor: &Self::Tensor, rows: usize, out: &mut Vec<f32>) {
        self.inner.download(tensor, rows, out);
    }

    fn save_block(&mut self, kv: &Self::Kv, block: u32, out: &mut [u8]) {
        self.inner.save_block(kv, block, out);
    }

    fn load_block(&mut self, kv: &mut Self::Kv, block: u32, bytes: &[u8]) {
        self.inner.load_block(kv, block, bytes);
    }
}

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
