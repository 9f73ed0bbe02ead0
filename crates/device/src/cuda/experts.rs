//! Mixture of experts: routing, rows in order of expert, two products over all experts at once, and
//! the weighted sum.
//!
//! Only the device knows how many rows an expert gets; grids and memory are for the worst case.
//! Experts are held in the activations' own type.

use std::sync::OnceLock;

use folio_formats::Matrix;

use super::driver::{Buffer, Device, KernelArg, args};
use super::experts_few::Few;
use super::gemm90::{Form90, Gemm90, Input90, Output90, Weight90};
use super::linear::{PlainArgs, plain_product};
use super::rows::activation_number;
use super::scratch::Scratch;
use super::tensor::{Float, Tensor, optional};
use super::weight::{Loader, load_plain};
use super::{Cuda, launch};
use crate::{Error, ExpertsSource, Result, RouterScore, Routing};

pub struct Experts {
    pub(super) float: Float,
    pub(super) count: usize,
    pub(super) hidden: usize,
    pub(super) inter: usize,
    /// Weights `[experts][2 * inter][hidden]`, gate rows above up rows.
    pub(super) gate_up: Buffer,
    /// Weights `[experts][hidden][inter]`.
    pub(super) down: Buffer,
    pub(super) gate_up_bias: Option<Buffer>,
    pub(super) down_bias: Option<Buffer>,
    /// In the form of Hopper's kernels; made once the number of experts per row is known.
    hopper: OnceLock<Option<(Weight90, Weight90)>>,
    /// The experts in the form of Hopper's kernels for few rows.
    pub(super) few: Option<Few>,
}

impl Experts {
    /// `random`: the values are generated on the device instead, from this seed.
    pub(super) fn new(
        loader: &mut Loader,
        source: ExpertsSource<'_>,
        float: Float,
        random: Option<u64>,
    ) -> Result<Self> {
        let device = &loader.device().clone();
        let count = source.gate_up.len();
        Error::check("number of down projections", count, source.down.len())?;
        let (Some(first_up), Some(first_down)) = (source.gate_up.first(), source.down.first()) else {
            return Err(Error::Unsupported { backend: "cuda", what: "a layer without experts".into() });
        };
        if count > 512 {
            return Err(Error::Unsupported {
                backend: "cuda",
                what: format!("a layer of {count} experts (at most 512)"),
            });
        }
        let (hidden, inter) = (first_up.cols(), first_down.cols());
        for (gate_up, down) in source.gate_up.iter().zip(&source.down) {
            Error::check("inputs of an expert's gate and up", hidden, gate_up.cols())?;
            Error::check("rows of an expert's gate and up", 2 * inter, gate_up.num_rows())?;
            Error::check("inputs of an expert's down", inter, down.cols())?;
            Error::check("rows of an expert's down", hidden, down.num_rows())?;
        }
        let mut stack = |matrices: &[Matrix<'_>], rows: usize, cols: usize, salt: u64| match random {
            Some(seed) => random_matrix(device, count * rows, cols, float, seed ^ salt),
            None => load_plain(loader, matrices, float),
        };
        let mut experts = Self {
            float,
            count,
            hidden,
            inter,
            gate_up: stack(&source.gate_up, 2 * inter, hidden, 1)?,
            down: stack(&source.down, hidden, inter, 2)?,
            gate_up_bias: biases(device, source.gate_up_bias, count, 2 * inter)?,
            down_bias: biases(device, source.down_bias, count, hidden)?,
            hopper: OnceLock::new(),
            few: None,
        };
        experts.few = Few::new(device, &experts)?;
        Ok(experts)
    }

    pub(super) fn bytes(&self) -> u64 {
        let biases = self.gate_up_bias.iter().chain(&self.down_bias);
        [&self.gate_up, &self.down].into_iter().chain(biases).map(|buffer| buffer.bytes() as u64).sum()
    }

    fn hopper(&self, device: &Device, gemm: Option<&Gemm90>, chosen: usize) -> Option<&(Weight90, Weight90)> {
        let made = self.hopper.get_or_init(|| {
            let fits = Gemm90::fits(self.hidden, self.count) && Gemm90::fits(self.inter, self.count);
            let gemm = gemm.filter(|_| self.float == Float::Bf16 && fits)?;
            let (hidden, inter) = (self.hidden, self.inter);
            let gate_up = gemm.experts(device, self.gate_up.ptr(), self.count, 2 * inter, hidden, chosen).ok()?;
            Some((gate_up, gemm.experts(device, self.down.ptr(), self.count, hidden, inter, chosen).ok()?))
        });
        made.as_ref()
    }
}

/// Values of about the size that a trained matrix with this many inputs has.
pub(super) fn random_matrix(device: &Device, rows: usize, cols: usize, float: Float, seed: u64) -> Result<Buffer> {
    let count = rows * cols;
    let buffer = device.alloc("a matrix of random values", count * float.bytes())?;
    let (count, scale) = (count as i64, (1.0 / cols as f32).sqrt());
    let grid = [16 * device.info().multiprocessors, 1, 1];
    match float {
        Float::F32 => launch(device, "random_f32", grid, 256, args![buffer.ptr(), count, seed, scale, 0.0f32]),
        Float::Bf16 => launch(device, "random_bf16", grid, 256, args![buffer.ptr(), count, seed, scale]),
    }
    Ok(buffer)
}

fn biases(device: &Device, biases: Option<Vec<Vec<f32>>>, count: usize, width: usize) -> Result<Option<Buffer>> {
    let Some(biases) = biases else { return Ok(None) };
    Error::check("number of expert biases", count, biases.len())?;
    for bias in &biases {
        Error::check("width of an expert's bias", width, bias.len())?;
    }
    device.alloc_from("biases of experts", &biases.concat()).map(Some)
}

/// Mirrors `RoutingArgs`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RoutingArgs {
    logits: u64,
    choice_bias: u64,
    experts_of: u64,
    weights: u64,
    positions: u64,
    sorted_rows: u64,
    sorted_experts: u64,
    offsets: u64,
    unused: u64,
    pub(super) rows: i32,
    experts: i32,
    top_k: i32,
    score: i32,
    normalize: i32,
    groups: i32,
    groups_kept: i32,
    scale: f32,
}

const _: () = assert!(size_of::<RoutingArgs>() == 104);

// SAFETY: repr(C), numbers and addresses only, as in routing.cu.
unsafe impl KernelArg for RoutingArgs {}

/// Most rows that one block routes and places by itself.
const ROUTED_ALONE: usize = 16;
/// For more rows: those with pairs that one block places.
const PLACED_AT_ONCE: usize = 64;

/// Bytes of the lists for this number of pairs of a row and an expert.
pub(super) fn list_bytes(pairs: usize, experts: usize) -> usize {
    4 * (5 * (pairs + 4) + experts + 8)
}

/// Bytes of one pair's intermediate values: its row in order, the results of both products, and the
/// gated values between them.
pub(super) fn row_bytes(hidden: usize, inter: usize, value: usize) -> usize {
    (2 * hidden + 3 * inter) * value
}

impl Cuda {
    pub(super) fn run_experts(
        &mut self,
        out: &Tensor,
        x: &Tensor,
        router_logits: &Tensor,
        experts: &Experts,
        op: &Routing<'_, Cuda>,
        rows: usize,
    ) {
        let (hidden, inter) = (experts.hidden, experts.inter);
        x.check("rows for experts", rows, hidden);
        out.check("rows of experts", rows, hidden);
        router_logits.check("router logits", rows, experts.count);
        assert!(op.top_k >= 1 && op.top_k <= experts.count, "{} experts of {}", op.top_k, experts.count);
        let (most_rows, float) = (self.most_rows.max(rows), experts.float);
        let (pairs, most) = (rows * op.top_k, most_rows * op.top_k);
        let Some(routing) = self.routing(router_logits, experts, op, rows, most_rows) else { return };
        let Some(x) = self.as_operand(x, rows, float) else { return };
        let room = |cuda: &mut Cuda, kind, width: usize| cuda.room(kind, most * width * float.bytes());
        let Some(sorted) = room(self, Scratch::SORTED, hidden) else { return };
        let Some(gate_up) = room(self, Scratch::GATE_UP, 2 * inter) else { return };
        let Some(gated) = room(self, Scratch::GATED, inter) else { return };
        let Some(down) = room(self, Scratch::DOWN, hidden) else { return };
        if self.few_experts(out, x, gated, experts, op, routing) {
            return;
        }
        self.route(&routing);

        let (device, name, hidden_i32) = (&self.device, float.name(), hidden as i32);
        let grid = |width: usize, count: usize| [count as u32, width.div_ceil(1024) as u32, 1];
        let kernel = format!("expert_rows_{name}");
        let pairs_i32 = pairs as i32;
        let copy = args![sorted, x, routing.sorted_rows, pairs_i32, hidden_i32];
        launch(device, &kernel, grid(hidden, pairs.div_ceil(4)), 128, copy);
        self.grouped(experts, op.top_k, true, (gate_up, sorted), routing.offsets, pairs, most);
        let (kernel, (activation, alpha, limit)) = (format!("expert_gate_{name}"), activation_number(op.activation));
        let (bias, owner) = (experts.gate_up_bias.as_ref().map_or(0, Buffer::ptr), routing.sorted_experts);
        let inter_i32 = inter as i32;
        let gate = args![gated, gate_up, bias, owner, activation, alpha, limit, inter_i32];
        launch(device, &kernel, grid(inter, pairs), 128, gate);
        self.grouped(experts, op.top_k, false, (down, gated), routing.offsets, pairs, most);
        let kernel = format!("expert_sum_{name}_{}", out.float().name());
        let (to, bias) = (out.ptr(), experts.down_bias.as_ref().map_or(0, Buffer::ptr));
        let (weights, positions, chosen) = (routing.weights, routing.positions, routing.experts_of);
        let sum = args![to, down, weights, positions, chosen, bias, routing.top_k, hidden_i32];
        launch(device, &kernel, grid(hidden, rows), 128, sum);
    }

    /// Arguments of routing, with room for its lists.
    fn routing(
        &mut self,
        logits: &Tensor,
        experts: &Experts,
        op: &Routing<'_, Cuda>,
        rows: usize,
        most_rows: usize,
    ) -> Option<RoutingArgs> {
        assert_eq!(logits.float(), Float::F32, "router logits are f32");
        let most = most_rows * op.top_k;
        let lists = self.room(Scratch::LISTS, list_bytes(most, experts.count))?;
        let mut next = lists;
        let mut take = |words: usize| {
            let at = next;
            next += 4 * words.next_multiple_of(4) as u64;
            at
        };
        Some(RoutingArgs {
            logits: logits.ptr(),
            choice_bias: optional(op.choice_bias),
            experts_of: take(most),
            weights: take(most),
            positions: take(most),
            sorted_rows: take(most),
            sorted_experts: take(most),
            offsets: take(experts.count + 1),
            unused: 0,
            rows: rows as i32,
            experts: experts.count as i32,
            top_k: op.top_k as i32,
            score: match op.score {
                RouterScore::Softmax => 0,
                RouterScore::SoftmaxOfBest => 1,
                RouterScore::Sigmoid => 2,
            },
            normalize: i32::from(op.normalize),
            groups: op.groups.max(1) as i32,
            groups_kept: op.groups_kept.max(1) as i32,
            scale: op.scale,
        })
    }

    /// Queues the kernels that fill the lists.
    pub(super) fn route(&self, call: &RoutingArgs) {
        let (rows, call) = (call.rows as usize, *call);
        let size = if call.experts <= 128 { 128 } else { 512 };
        let (blocks, threads) = match rows {
            0..=8 => (1, 256),
            9..=ROUTED_ALONE => (1, 512),
            _ => (rows.div_ceil(8) as u32, 256),
        };
        launch(&self.device, &format!("route_{size}"), [blocks, 1, 1], threads, args![call]);
        if rows > ROUTED_ALONE {
            let blocks = rows.div_ceil(PLACED_AT_ONCE) as u32;
            launch(&self.device, "place_pairs", [blocks, 1, 1], 1024, args![call]);
        }
    }

    /// Queues one of the two products, of `(out, x)`.
    fn grouped(
        &self,
        experts: &Experts,
        chosen: usize,
        first: bool,
        (out, x): (u64, u64),
        offsets: u64,
        pairs: usize,
        most: usize,
    ) {
        let (hidden, inter) = (experts.hidden, experts.inter);
        let (w, n, k) = if first { (&experts.gate_up, 2 * inter, hidden) } else { (&experts.down, hidden, inter) };
        if let Some(gemm) = &self.gemm90
            && let Some((gate_up, down)) = experts.hopper(&self.device, Some(gemm), chosen)
        {
            let to = Output90 { ptr: out, form: Form90::Whole(experts.float) };
            let from = Input90 { ptr: x, rows: most, cols: k };
            gemm.grouped(&self.device, to, from, if first { gate_up } else { down }, None, offsets, pairs);
            return;
        }
        let call = PlainArgs {
            out,
            x,
            w: w.ptr(),
            bias: 0,
            offsets,
            m: pairs as i32,
            n: n as i32,
            k: k as i32,
            experts: experts.count as i32,
            out_is_f32: i32::from(experts.float == Float::F32),
            padding: 0,
        };
        plain_product(&self.device, experts.float, call);
    }
}
