//! All operations: each is declared here and nowhere else.

use std::{
    borrow::{Borrow, BorrowMut},
    fmt::{Debug, Formatter},
};

use super::op::operations;
use crate::{Activation, Attention, Handles, Intercept, Norm, PrepareQkv, Product, Routing, Wraps};

operations! {
    /// Cosines and sines of this step's positions for rotary embedding number `rope`: the angle is
    /// `position * inv_freq[i]` in f32, and both functions are multiplied by `magnitude`.
    RopeAngles = fn rope_angles(
        &mut self,
        inputs: (&mut Self::Inputs),
        rope: usize,
        inv_freq: (&Self::Vector),
        magnitude: f32,
    );

    /// `out[r] = table[ids[r]] * scale`.
    Embed = fn embed(
        &mut self,
        out: (&mut Self::Tensor),
        table: (&Self::Weight),
        inputs: (&Self::Inputs),
        scale: f32,
    );

    /// `out = x / rms(x) * weight`, row by row.
    RmsNorm = fn rms_norm(
        &mut self,
        out: (&mut Self::Tensor),
        x: (&Self::Tensor),
        weight: (&Self::Vector),
        eps: f32,
        rows: usize,
    );

    /// `residual += x * scale`.
    Add = fn add(&mut self, residual: (&mut Self::Tensor), x: (&Self::Tensor), scale: f32, rows: usize);

    /// `residual += x * scale; out = rms_norm(residual)`.
    AddRmsNorm = fn add_rms_norm(
        &mut self,
        out: (&mut Self::Tensor),
        residual: (&mut Self::Tensor),
        x: (&Self::Tensor),
        scale: f32,
        weight: (&Self::Vector),
        eps: f32,
        rows: usize,
    );

    /// `out = x * weight^T (+ bias)`.
    Linear = fn linear(
        &mut self,
        out: (&mut Self::Tensor),
        x: (&Self::Tensor),
        weight: (&Self::Weight),
        bias: (Option<&Self::Vector>),
        rows: usize,
    );

    /// `out = rms_norm(x) * weight^T (+ bias)`, as precise as its parts. `normed` has room for the
    /// normed rows; its contents mean nothing afterwards.
    NormLinear = fn norm_linear(
        &mut self,
        out: (&mut Self::Tensor),
        normed: (&mut Self::Tensor),
        x: (&Self::Tensor),
        norm: (Norm<Self>),
        product: (Product<Self>),
        rows: usize,
    ) {
        self.rms_norm(normed, x, norm.weight, norm.eps, rows);
        self.linear(out, normed, product.weight, product.bias, rows);
    }

    /// The same with outputs `[gate | up]` (`gate_up` has room for them); `out = act(gate) * up`.
    NormLinearGated = fn norm_linear_gated(
        &mut self,
        out: (&mut Self::Tensor),
        gate_up: (&mut Self::Tensor),
        normed: (&mut Self::Tensor),
        x: (&Self::Tensor),
        norm: (Norm<Self>),
        product: (Product<Self>),
        activation: Activation,
        rows: usize,
    ) {
        self.norm_linear(gate_up, normed, x, norm, product, rows);
        self.gate(out, gate_up, activation, rows);
    }

    /// `x * weight^T (+ bias)`, then [`Operations::gate`] of that; `gate_up` has room for the
    /// product.
    LinearGated = fn linear_gated(
        &mut self,
        out: (&mut Self::Tensor),
        gate_up: (&mut Self::Tensor),
        x: (&Self::Tensor),
        product: (Product<Self>),
        activation: Activation,
        rows: usize,
    ) {
        self.linear(gate_up, x, product.weight, product.bias, rows);
        self.gate(out, gate_up, activation, rows);
    }

    /// `residual += (x * weight^T (+ bias)) * scale`, as precise as its parts; `branch` has room
    /// for the product.
    LinearAdd = fn linear_add(
        &mut self,
        residual: (&mut Self::Tensor),
        branch: (&mut Self::Tensor),
        x: (&Self::Tensor),
        product: (Product<Self>),
        scale: f32,
        rows: usize,
    ) {
        self.linear(branch, x, product.weight, product.bias, rows);
        self.add(residual, branch, scale, rows);
    }

    /// Names the weight that the product after the next [`Operations::attention`] reads, so that a
    /// device may prefetch it meanwhile.
    FetchAhead = fn fetch_ahead(&mut self, weight: (&Self::Weight)) {
        let _ = weight;
    }

    /// On rows `[q heads | k heads | v heads]`: norms q and k if asked to, rotates them, and writes
    /// k and v to the step's slots of layer `layer` of the group. q stays in `qkv` for
    /// [`Operations::attention`].
    PrepareQkv = fn prepare_qkv(
        &mut self,
        qkv: (&mut Self::Tensor),
        kv: (&mut Self::Kv),
        layer: usize,
        op: (PrepareQkv<Self>),
        inputs: (&Self::Inputs),
    );

    /// Causal attention of the step's q over its spans' blocks, by online softmax: `out` is `[rows,
    /// heads * head_dim]`. Rows of a [`tree`](crate::tree) see their own path, and get the bits
    /// that they would get in a chain.
    Attention = fn attention(
        &mut self,
        out: (&mut Self::Tensor),
        qkv: (&Self::Tensor),
        kv: (&Self::Kv),
        layer: usize,
        op: (Attention<Self>),
        inputs: (&Self::Inputs),
    );

    /// Rows `[gate | up]` to `act(gate) * up`, half as wide.
    Gate = fn gate(&mut self, out: (&mut Self::Tensor), gate_up: (&Self::Tensor), activation: Activation, rows: usize);

    /// Chooses experts by the router's logits `[rows, experts]` and adds their outputs, weighted,
    /// in expert order: `out = sum_e w_e * down_e(act(gate_e(x)) * up_e(x))`. Rows are computed
    /// grouped by expert.
    ExpertsForward = fn experts_forward(
        &mut self,
        out: (&mut Self::Tensor),
        x: (&Self::Tensor),
        router_logits: (&Self::Tensor),
        experts: (&Self::Experts),
        op: (Routing<Self>),
        rows: usize,
    );

    /// `out[r] += x[r] * sigmoid(gate[r])`: a shared expert behind its gate; `gate` is `[rows, 1]`.
    AddGated = fn add_gated(
        &mut self,
        out: (&mut Self::Tensor),
        x: (&Self::Tensor),
        gate: (&Self::Tensor),
        rows: usize,
    );

    /// The rows that have outputs: `out[i] = x[inputs.outputs[i]]`.
    GatherOutputs = fn gather_outputs(&mut self, out: (&mut Self::Tensor), x: (&Self::Tensor), inputs: (&Self::Inputs));

    /// `logits = cap * tanh(logits * scale / cap)`, or `logits * scale` without a cap.
    FinishLogits = fn finish_logits(
        &mut self,
        logits: (&mut Self::Tensor),
        scale: f32,
        soft_cap: (Option<f32>),
        rows: usize,
    );

    /// `out[r][column..column + width of x] = x[r]`; the other columns keep their values.
    ///
    /// A device without a kernel for it copies by way of the host, outside recorded steps
    /// ([`Steps::records_copies`](crate::Steps::records_copies)).
    CopyColumns = fn copy_columns(&mut self, out: (&mut Self::Tensor), column: usize, x: (&Self::Tensor), rows: usize) {
        if rows == 0 {
            return;
        }
        let (mut target, mut values) = (Vec::new(), Vec::new());
        self.download(out, rows, &mut target);
        self.download(x, rows, &mut values);
        let (all, width) = (target.len() / rows, values.len() / rows);
        for (out, x) in target.chunks_exact_mut(all).zip(values.chunks_exact(width)) {
            out[column..column + width].copy_from_slice(x);
        }
        self.upload_rows(out, &target);
    }

    /// Copies rows between steps: pairs of (from, to) that the host names, the second a row of
    /// `out` that occurs once. Never part of a recorded step.
    CopyRows = fn copy_rows(&mut self, out: (&mut Self::Tensor), x: (&Self::Tensor), pairs: (&[(u32, u32)])) {
        let (Some(from), Some(to)) = (pairs.iter().map(|pair| pair.0).max(), pairs.iter().map(|pair| pair.1).max())
        else {
            return;
        };
        let (mut target, mut values) = (Vec::new(), Vec::new());
        self.download(out, to as usize + 1, &mut target);
        self.download(x, from as usize + 1, &mut values);
        let width = values.len() / (from as usize + 1);
        for &(from, to) in pairs {
            target[to as usize * width..][..width].copy_from_slice(&values[from as usize * width..][..width]);
        }
        self.upload_rows(out, &target);
    }

    /// Copies values from the host to the first rows. Never part of a recorded step.
    UploadRows = fn upload_rows(&mut self, tensor: (&mut Self::Tensor), values: (&[f32]));

    /// Copies the first `rows` rows to the host, packed, into `out`. Never part of a recorded step.
    Download = fn download(&mut self, tensor: (&Self::Tensor), rows: usize, out: (&mut Vec<f32>));

    /// Copies whole blocks, all layers of the group: pairs of (from, to).
    CopyBlocks = fn copy_blocks(&mut self, kv: (&mut Self::Kv), pairs: (&[(u32, u32)]));

    /// Copies keys and values of single tokens, all layers of the group: pairs of slots (from, to),
    /// one after the other, so that a pair reads the values that earlier pairs wrote.
    MoveTokens = fn move_tokens(&mut self, kv: (&mut Self::Kv), pairs: (&[(u32, u32)]));

    /// Copies one block, all layers of the group, to the host: keys, then values,
    /// `KvShape::block_bytes` in all.
    ///
    /// The bytes are opaque: the same backend with storage of the same layers, heads and format
    /// gives them back bit for bit, in any block; they have no other reader. The copy waits for the
    /// operations before it and is done when it returns, so it is never part of a recorded step.
    SaveBlock = fn save_block(&mut self, kv: (&Self::Kv), block: u32, out: (&mut [u8]));

    /// Fills one block, all layers of the group, with the bytes of [`Operations::save_block`].
    /// Later operations see them; it is never part of a recorded step.
    LoadBlock = fn load_block(&mut self, kv: (&mut Self::Kv), block: u32, bytes: (&[u8]));
}
