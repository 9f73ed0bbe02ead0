//! Weights in the one layout that serves one row and 512: outputs in panels of 32 lanes, the inner
//! dimension running through a panel in memory order.
//!
//! | stored as | panel layout | a step |
//! |---|---|---|
//! | F32 | `[k][32]` f32 | 128 bytes, one inner value |
//! | F16 | `[k][32]` f16 | 64 bytes, one inner value |
//! | BF16 | `[k / 2][32][2]` bf16 | 128 bytes, two inner values for one dot-product instruction |
//! | codes | `[k / group]` of codes, `[32]` f16 scales, maybe `[32]` f16 minimums | one group |
//! | with multiples | `[k / 256]` of f16 units, byte multiples, codes | a super-block |
//!
//! Units and multiples exist for scales and, if the format has them, for minimums. Codes have one
//! of these layouts:
//!
//! | bits | layout | bytes an inner value |
//! |---|---|---|
//! | 8 | `[group / 4][32][4]`, level + 128 | 32 |
//! | 4 | `[group / 8][32][4]`, four neighbours low, the next four high | 16 |
//! | 5 | `[group / 16]` of `[2][32][4]` like 4 bits, and `[4][32]` times four fifth bits | 20 |
//! | 6 | `[group / 16]` of `[2][32][4]` like 4 bits, and `[32][4]` of 4 upper pairs of bits | 24 |
//!
//! A matrix is packed part by part, so parts of one matrix may differ. Codes may have their own
//! order of columns, and outlier columns beside them: a small BF16 weight that is added to the
//! product. A part that is neither plain values nor has a coding is decoded and held as BF16.

pub(crate) mod codes;
mod packing;
mod plain;
mod runs;
mod shape;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use folio_formats::{Coding, Matrix, Numbers};

pub use packing::{LINE_BYTES, Packing, code_bytes};
pub use shape::PartShape;

use super::Ctx;
use super::buffer::Buffer;
use super::matmul::{Activations, Columns, Heights, Kernel};
use super::packed::{PartMemory, Supply};
use super::pool::Disjoint;
use crate::{ExpertsSource, Result};
use codes::CodedRow;
use runs::Run;

/// Outputs in a panel.
pub const LANES: usize = 32;

/// The packed parts of a matrix's [`Weight`], in the order in which they are packed.
pub fn packed_parts(matrix: &Matrix<'_>) -> Result<Vec<PartShape>> {
    Ok(Run::each(matrix)?.iter().flat_map(Run::shapes).collect())
}

/// The parts of experts, in the order in which they are packed.
pub fn packed_experts_parts(source: &ExpertsSource<'_>) -> Result<Vec<PartShape>> {
    let mut shapes = Vec::new();
    for matrices in [&source.gate_up, &source.down] {
        shapes.extend(uniform_runs(matrices)?.iter().flatten().flat_map(Run::shapes));
    }
    Ok(shapes)
}

/// A packed matrix `[outputs, inputs]`.
pub struct Weight {
    outputs: usize,
    inputs: usize,
    parts: Vec<Part>,
    feeds: Vec<Feed>,
}

/// Neighbouring outputs of a weight, packed alike. Outputs missing from the last panel and values
/// missing from the last step are zeros.
pub struct Part {
    first_output: usize,
    outputs: usize,
    inputs: usize,
    kernel: Kernel,
    data: Arc<Buffer<u8>>,
    /// Factors, one for each output of each panel, if codes have scales.
    factors: Arc<Buffer<f32>>,
    /// Index of the feed that it multiplies.
    feed: usize,
    /// Columns in BF16, to be added.
    outliers: Option<Box<Part>>,
}

/// Activations in the form that some parts of a weight need.
#[derive(PartialEq)]
pub struct Feed {
    pub activations: Activations,
    pub heights: Heights,
    /// Order of the columns and columns that count as zero, see [`Columns`].
    order: Option<Arc<[u32]>>,
    zeroed: Option<Arc<[u32]>>,
}

impl Feed {
    pub fn columns(&self) -> Columns<'_> {
        Columns { order: self.order.as_deref(), zeroed: self.zeroed.as_deref().unwrap_or_default() }
    }

    /// Words of packed activations in one row of `inputs` values.
    pub fn row_words(&self, inputs: usize) -> usize {
        self.activations.row_words(self.order.as_ref().map_or(inputs, |order| order.len()))
    }
}

impl Weight {
    pub(crate) fn pack(ctx: Ctx<'_>, supply: &mut Supply, matrix: &Matrix<'_>) -> Result<Self> {
        Self::pack_runs(ctx, supply, matrix, &Run::each(matrix)?)
    }

    /// Weights that share one kernel, for many products in one fork: all are single parts of one
    /// packing, without order or outliers. Other matrices are converted to BF16.
    pub(crate) fn pack_uniform(ctx: Ctx<'_>, supply: &mut Supply, matrices: &[Matrix<'_>]) -> Result<Vec<Self>> {
        let runs = uniform_runs(matrices)?;
        matrices.iter().zip(&runs).map(|(matrix, runs)| Self::pack_runs(ctx, supply, matrix, runs)).collect()
    }

    fn pack_runs(ctx: Ctx<'_>, supply: &mut Supply, matrix: &Matrix<'_>, runs: &[Run<'_, '_>]) -> Result<Self> {
        let mut weight =
            Self { outputs: matrix.num_rows(), inputs: matrix.cols(), parts: Vec::new(), feeds: Vec::new() };
        let panels = |runs: &[Run<'_, '_>]| runs.iter().map(|run| run.outputs.div_ceil(LANES)).sum::<usize>();
        for (index, run) in runs.iter().enumerate() {
            let place = Place { first_panel: panels(&runs[..index]), total_panels: panels(runs) };
            let mut part = pack_run(ctx, supply, place, run)?;
            if let (Some(columns), Some(shape)) = (run.outlier_columns(), run.outlier_shape()) {
                let mut outliers = pack_outliers(ctx, supply, place, run, shape)?;
                outliers.feed = weight.feed(&outliers.kernel, Some(columns), None);
                part.outliers = Some(Box::new(outliers));
            }
            part.feed = weight.feed(&part.kernel, run.order(), run.outlier_columns());
            weight.parts.push(part);
        }
        Ok(weight)
    }

    /// A weight of any coding, even one that no file has.
    #[cfg(test)]
    pub(crate) fn from_codes(
        ctx: Ctx<'_>,
        coding: Coding,
        (outputs, inputs): (usize, usize),
        read: impl Fn(usize, &mut CodedRow) + Sync,
    ) -> Self {
        let mut weight = Self { outputs, inputs, parts: Vec::new(), feeds: Vec::new() };
        let place = Place { first_panel: 0, total_panels: outputs.div_ceil(LANES) };
        let part = pack_coded(ctx, &mut Supply::Fresh, place, coding, (outputs, inputs), read).unwrap();
        weight.feed(&part.kernel, None, None);
        weight.parts.push(part);
        weight
    }

    /// Index of the feed with these properties, which is added if there is none yet.
    fn feed(&mut self, kernel: &Kernel, order: Option<&Arc<[u32]>>, zeroed: Option<&Arc<[u32]>>) -> usize {
        let feed = Feed {
            activations: kernel.activations(),
            heights: kernel.heights(),
            order: order.cloned(),
            zeroed: zeroed.cloned(),
        };
        let found = self.feeds.iter().position(|other| *other == feed);
        found.unwrap_or_else(|| {
            self.feeds.push(feed);
            self.feeds.len() - 1
        })
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    pub(crate) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The packed forms of activations, each computed once for all parts that need it.
    pub(crate) fn feeds(&self) -> &[Feed] {
        &self.feeds
    }

    /// Bytes held, padding included.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(Part::bytes).sum()
    }

    /// One output's weights, in f32.
    pub(crate) fn read_output(&self, output: usize, out: &mut [f32]) {
        assert!(output < self.outputs, "output {output} of {}", self.outputs);
        let part = self.parts.iter().rfind(|part| part.first_output <= output).expect("parts cover all outputs");
        let output = output - part.first_output;
        let Feed { order, zeroed, .. } = &self.feeds[part.feed];
        match order {
            None => part.read_output(output, out),
            Some(order) => {
                let mut stored = vec![0.0; out.len()];
                part.read_output(output, &mut stored);
                for (value, &input) in stored.iter().zip(order.iter()) {
                    out[input as usize] = *value;
                }
            }
        }
        if let (Some(outliers), Some(columns)) = (&part.outliers, zeroed) {
            let mut values = vec![0.0; columns.len()];
            outliers.read_output(output, &mut values);
            for (value, &input) in values.iter().zip(columns.iter()) {
                out[input as usize] = *value;
            }
        }
    }
}

impl Part {
    fn new(ctx: Ctx<'_>, shape: PartShape, memory: PartMemory) -> Self {
        let PartShape { packing, outputs, inputs } = shape;
        let PartMemory { data, factors } = memory;
        let kernel = Kernel::new(ctx.isa, packing);
        Self { first_output: 0, outputs, inputs, kernel, data, factors, feed: 0, outliers: None }
    }

    /// Index of its first output in the weight.
    pub fn first_output(&self) -> usize {
        self.first_output
    }

    pub fn outputs(&self) -> usize {
        self.outputs
    }

    pub fn inputs(&self) -> usize {
        self.inputs
    }

    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// An index into [`Weight::feeds`].
    pub fn feed(&self) -> usize {
        self.feed
    }

    pub fn outliers(&self) -> Option<&Part> {
        self.outliers.as_deref()
    }

    pub fn num_panels(&self) -> usize {
        self.outputs.div_ceil(LANES)
    }

    /// Steps of the inner dimension in each panel.
    pub fn num_steps(&self) -> usize {
        self.inputs.div_ceil(self.kernel.packing().step_values())
    }

    pub fn panel_bytes(&self) -> usize {
        self.kernel.packing().panel_bytes(self.inputs)
    }

    pub fn panel(&self, panel: usize) -> &[u8] {
        let bytes = self.panel_bytes();
        &self.data[panel * bytes..(panel + 1) * bytes]
    }

    /// One factor per output of the panels, if codes have scales.
    pub fn factors(&self, panels: Range<usize>) -> Option<&[f32]> {
        self.kernel.packing().has_factors().then(|| &self.factors[panels.start * LANES..panels.end * LANES])
    }

    fn bytes(&self) -> u64 {
        let own = self.data.len() + size_of_val(&self.factors[..]);
        own as u64 + self.outliers.as_ref().map_or(0, |outliers| outliers.bytes())
    }

    /// One output's weights in stored order, without outliers.
    fn read_output(&self, output: usize, out: &mut [f32]) {
        let (panel, lane) = (output / LANES, output % LANES);
        match self.kernel.packing() {
            Packing::Coded(coding) => {
                codes::read_lane(coding, self.panel(panel), lane, self.factors[panel * LANES + lane], out);
            }
            packing => plain::read_lane(*packing, self.panel(panel), lane, out),
        }
    }
}

/// Packings of all matrices, such that one kernel serves all.
fn uniform_runs<'m, 'a>(matrices: &'m [Matrix<'a>]) -> Result<Vec<Vec<Run<'m, 'a>>>> {
    let runs = matrices.iter().map(Run::each).collect::<Result<Vec<_>>>()?;
    let packing = runs.first().and_then(|runs| runs.first()).map(|run| run.packing);
    let alike = runs.iter().all(|runs| match &runs[..] {
        [only] => Some(only.packing) == packing && only.order().is_none() && only.outlier_columns().is_none(),
        _ => false,
    });
    if alike { Ok(runs) } else { matrices.iter().map(Run::decoded).collect() }
}

/// Position of a part's panels among those of its weight, which are multiplied in one fork.
#[derive(Clone, Copy)]
struct Place {
    first_panel: usize,
    total_panels: usize,
}

fn pack_run(ctx: Ctx<'_>, supply: &mut Supply, place: Place, run: &Run<'_, '_>) -> Result<Part> {
    let mut part = match run.packing {
        Packing::Coded(coding) => pack_coded(ctx, supply, place, coding, (run.outputs, run.inputs), |output, row| {
            let (part, index) = run.locate(output);
            let CodedRow { codes, scales, minimums, units } = row;
            match coding.numbers {
                Numbers::Own => part.read_codes(index, codes, scales, minimums),
                Numbers::Multiples => part.read_multiples(index, codes, scales, minimums, units),
            }
        })?,
        packing => {
            let memory = supply.part(run.shape(), |data, _| {
                for_each_panel(ctx, place, packing.panel_bytes(run.inputs), data, |panel, target| {
                    plain::pack_panel(run, panel * LANES, target);
                });
            })?;
            Part::new(ctx, run.shape(), memory)
        }
    };
    part.first_output = run.first_output;
    Ok(part)
}

/// Packs `[outputs, inputs]` of codes; `read` fills in one output.
fn pack_coded(
    ctx: Ctx<'_>,
    supply: &mut Supply,
    place: Place,
    coding: Coding,
    shape: (usize, usize),
    read: impl Fn(usize, &mut CodedRow) + Sync,
) -> Result<Part> {
    let packing = Packing::Coded(coding);
    let part_shape = PartShape { packing, outputs: shape.0, inputs: shape.1 };
    let memory = supply.part(part_shape, |data, factors| {
        let factors = Disjoint::new(factors);
        for_each_panel(ctx, place, packing.panel_bytes(shape.1), data, |panel, target| {
            // SAFETY: each panel is packed by one thread, and panels' factors do not overlap.
            let factors = unsafe { factors.part(panel * LANES..(panel + 1) * LANES) };
            codes::pack_panel(&coding, shape, &read, panel * LANES, target, factors);
        });
    })?;
    Ok(Part::new(ctx, part_shape, memory))
}

fn pack_outliers(ctx: Ctx<'_>, supply: &mut Supply, place: Place, run: &Run<'_, '_>, shape: PartShape) -> Result<Part> {
    let memory = supply.part(shape, |data, _| {
        for_each_panel(ctx, place, shape.packing.panel_bytes(shape.inputs), data, |panel, target| {
            plain::pack_outliers(run, panel * LANES, target);
        });
    })?;
    Ok(Part::new(ctx, shape, memory))
}

/// Packs each panel on the memory node of the threads that will multiply it. Each product takes
/// other experts, so for them this merely spreads panels over all nodes.
fn for_each_panel(
    ctx: Ctx<'_>,
    place: Place,
    panel_bytes: usize,
    data: &mut [u8],
    pack: impl Fn(usize, &mut [u8]) + Sync,
) {
    if panel_bytes == 0 {
        return;
    }
    let end_panel = place.first_panel + data.len() / panel_bytes;
    let target = Disjoint::new(data);
    ctx.pool.for_each_on_node(place.first_panel..end_panel, place.total_panels, |panel| {
        let panel = panel - place.first_panel;
        // SAFETY: each panel is packed by one thread, and panels do not overlap.
        pack(panel, unsafe { target.part(panel * panel_bytes..(panel + 1) * panel_bytes) });
    });
}
