//! The table that chooses the kernels of a matrix product: by the weight's form, the number of
//! rows, the work fused with the product, and the promise about bits. `linear.rs` tries the paths
//! that it names, best first; a path may still decline a shape that its kernels do not take.

use super::linear_coded;
use super::linear_stream::STREAMED_ROWS;

/// Most rows for which fusing a product with its surroundings pays. Measured on an H200, two rows
/// take longer than with kernels apart.
pub(super) const FUSED_ROWS: usize = 1;
/// Most rows for which coded weights are streamed where Hopper's kernels do not take them: reading
/// the codes once for every 16 rows costs less than writing their values.
const CODED_ROWS: usize = 48;
/// Most rows for which plain weights are streamed although there is a library or a kernel for
/// Hopper. Measured on an H200: one row takes 0.85 of the library's time, eight the same, 16 more.
const PLAIN_ROWS: usize = 8;
/// Most rows for which this project's kernels for Hopper are faster than cuBLASLt with bf16: by 13%
/// of a step of 16 sequences of shape 8b, 9% of one of 64, 5% of one of 80, 1% of one of 96. The
/// library is faster by 1% of one of 128.
const HOPPER_ROWS: usize = 96;
/// Most rows for which weights in eight-bit floats are streamed, with rows that are not rounded.
const ROUNDED_ROWS: usize = 16;
/// Bytes of widened values up to which a coded weight may be widened. They are scratch memory,
/// which is taken once for all weights. Larger weights are streamed for any number of rows.
pub(super) const WIDENED_BYTES: usize = 512 << 20;

/// Kernels that multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    /// `linear_few`: norms its input, gates its output or adds it to the residual by itself.
    Fused,
    /// `gemm90`: tensor cores of Hopper, with bf16 values.
    Hopper,
    /// `linear_stream`: reads weights as they are stored, once for every 8 or 16 rows.
    Streamed,
    /// cuBLASLt, with both sides in e4m3.
    RoundedByLibrary,
    /// `gemm90`, with both sides in e4m3.
    RoundedByHopper,
    /// `linear_coded`: tensor cores of Hopper, codes decoded on the way.
    CodedTiles,
    /// Values are written as bf16, and their product has a path of its own.
    Widened,
    /// cuBLASLt, with bf16 values.
    Library,
    /// `linear_tile`: tensor cores of any device, with bf16 values.
    Tiled,
    /// `linear_f32`: f32 on both sides.
    Float32,
    /// `linear_plain`: plain cores, any shape.
    Plain,
}

/// The form of a weight, as far as the choice depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Bf16,
    Float32,
    Float8 {
        /// One scale for 128 x 128 values, not one an output.
        blocks: bool,
    },
    /// Codes, or several forms in one weight.
    Coded {
        /// `linear_coded` has kernels for all of them.
        in_tiles: bool,
    },
    /// The bf16 values of a weight that was widened.
    Widened,
}

/// Work that a product does beside multiplying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fusion {
    None,
    /// Its input is normed first; its output is written, or gated.
    Norm,
    Gate,
    /// Its output is added to the residual.
    Add,
}

/// Everything that the choice depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub kind: Kind,
    pub fusion: Fusion,
    pub rows: usize,
    pub outputs: usize,
    pub inputs: usize,
    pub out_is_f32: bool,
    pub batch_invariant: bool,
    /// Activations are f32.
    pub float32: bool,
    /// cuBLASLt was found.
    pub library: bool,
    /// cuBLASLt takes a scale an output and a scale a row.
    pub library_scales: bool,
    /// The device is a Hopper, and this weight has the layout of its kernels.
    pub hopper: bool,
    /// The device is a Hopper.
    pub on_hopper: bool,
}

struct Row {
    path: Path,
    takes: fn(&Case) -> bool,
}

/// Paths from the best to the last resort. A product takes the first one that takes its case.
const TABLE: &[Row] = &[
    Row { path: Path::Fused, takes: |case| case.is_fused() && case.fusion != Fusion::Gate },
    Row { path: Path::RoundedByLibrary, takes: |case| case.is_rounded() && case.rounds_by_library() },
    Row { path: Path::RoundedByHopper, takes: |case| case.is_rounded() && case.hopper },
    Row { path: Path::CodedTiles, takes: Case::fits_coded_tiles },
    Row { path: Path::Hopper, takes: Case::is_for_hopper },
    Row { path: Path::Streamed, takes: Case::is_streamed },
    Row { path: Path::Widened, takes: |case| case.is_plain() && case.is_coded() },
    Row { path: Path::Library, takes: |case| case.has_bf16_values() && case.library && !case.batch_invariant },
    Row { path: Path::Tiled, takes: |case| case.has_bf16_values() && case.inputs.is_multiple_of(8) },
    Row { path: Path::Float32, takes: |case| case.is_float32() && case.inputs.is_multiple_of(4) && case.out_is_f32 },
    Row { path: Path::Plain, takes: |case| case.is_float32() || case.has_bf16_values() },
];

impl Case {
    /// The paths that take this case, best first.
    pub fn paths(self) -> impl Iterator<Item = Path> {
        TABLE.iter().filter(move |row| (row.takes)(&self)).map(|row| row.path)
    }

    fn is_plain(&self) -> bool {
        self.fusion == Fusion::None
    }

    fn is_coded(&self) -> bool {
        matches!(self.kind, Kind::Float8 { .. } | Kind::Coded { .. })
    }

    fn is_float32(&self) -> bool {
        self.is_plain() && self.kind == Kind::Float32
    }

    fn has_bf16_values(&self) -> bool {
        self.is_plain() && matches!(self.kind, Kind::Bf16 | Kind::Widened)
    }

    /// The sums of the fused kernels are not those of the streaming kernels to the bit.
    fn is_fused(&self) -> bool {
        let weight = self.kind != Kind::Widened;
        weight && (1..=fused_rows(self.batch_invariant, self.float32)).contains(&self.rows)
    }

    /// Rows are rounded to e4m3 where there are many, and where the bits may not depend on their
    /// number.
    fn is_rounded(&self) -> bool {
        let wanted = self.rows > ROUNDED_ROWS || (self.batch_invariant && self.hopper);
        let float8 = matches!(self.kind, Kind::Float8 { .. });
        self.is_plain() && float8 && wanted && !self.out_is_f32
    }

    fn rounds_by_library(&self) -> bool {
        let one_scale_an_output = self.kind == Kind::Float8 { blocks: false };
        let library = self.library && self.library_scales && !self.batch_invariant;
        library && one_scale_an_output && self.outputs.is_multiple_of(16)
    }

    fn fits_coded_tiles(&self) -> bool {
        let weight = self.is_plain() && self.has_coded_tiles();
        weight && linear_coded::ROWS.contains(&self.rows)
    }

    /// `linear_coded` takes the weight, for some numbers of rows.
    pub fn has_coded_tiles(&self) -> bool {
        self.kind == Kind::Coded { in_tiles: true } && self.on_hopper && !self.batch_invariant
    }

    fn is_for_hopper(&self) -> bool {
        let theirs = self.rows > PLAIN_ROWS && (self.rows <= HOPPER_ROWS || !self.library);
        match (self.fusion, self.kind) {
            (Fusion::None | Fusion::Gate, Kind::Bf16) => self.hopper && (theirs || self.batch_invariant),
            (Fusion::None, Kind::Widened) => self.hopper && !self.library,
            _ => false,
        }
    }

    fn is_streamed(&self) -> bool {
        if !self.is_plain() {
            return self.fusion != Fusion::Norm && self.is_fused();
        }
        let few = match self.kind {
            Kind::Bf16 if self.library || self.hopper => self.rows <= PLAIN_ROWS,
            Kind::Bf16 => self.rows <= STREAMED_ROWS,
            Kind::Float8 { .. } | Kind::Coded { .. } => {
                self.rows <= CODED_ROWS || self.outputs * self.inputs * 2 > WIDENED_BYTES
            }
            Kind::Float32 | Kind::Widened => return false,
        };
        few || self.batch_invariant
    }
}

/// Most rows of a step whose products are fused with their surroundings.
pub(super) fn fused_rows(batch_invariant: bool, float32: bool) -> usize {
    if batch_invariant || float32 { 0 } else { FUSED_ROWS }
}

#[cfg(test)]
mod tests {
    use super::Path::*;
    use super::*;

    const HOPPER: Case = Case {
        kind: Kind::Bf16,
        fusion: Fusion::None,
        rows: 1,
        outputs: 4096,
        inputs: 4096,
        out_is_f32: false,
        batch_invariant: false,
        float32: false,
        library: true,
        library_scales: true,
        hopper: true,
        on_hopper: true,
    };

    /// Paths by ascending numbers of rows: `(most rows, paths)`.
    fn by_rows(case: Case) -> Vec<(usize, Vec<Path>)> {
        let mut found: Vec<(usize, Vec<Path>)> = Vec::new();
        for rows in 1..=1024 {
            let paths: Vec<_> = Case { rows, ..case }.paths().collect();
            match found.last_mut() {
                Some((last, before)) if *before == paths => *last = rows,
                _ => found.push((rows, paths)),
            }
        }
        found
    }

    #[test]
    fn plain_weights() {
        let rest = [Library, Tiled, Plain];
        let with = |paths: &[Path]| paths.iter().chain(&rest).copied().collect::<Vec<_>>();
        let expected =
            [(1, with(&[Fused, Streamed])), (8, with(&[Streamed])), (96, with(&[Hopper])), (1024, with(&[]))];
        assert_eq!(by_rows(HOPPER), expected);
        let alone = Case { library: false, ..HOPPER };
        let expected = [
            (1, vec![Fused, Streamed, Tiled, Plain]),
            (8, vec![Streamed, Tiled, Plain]),
            (1024, vec![Hopper, Tiled, Plain]),
        ];
        assert_eq!(by_rows(alone), expected);
        let ampere = Case { hopper: false, on_hopper: false, library: false, ..HOPPER };
        let expected =
            [(1, vec![Fused, Streamed, Tiled, Plain]), (32, vec![Streamed, Tiled, Plain]), (1024, vec![Tiled, Plain])];
        assert_eq!(by_rows(ampere), expected);
    }

    /// One path alone takes every number of rows, so the bits of a row do not depend on it.
    #[test]
    fn the_first_path_of_batch_invariant_products_is_the_same_for_all_rows() {
        for kind in [
            Kind::Bf16,
            Kind::Float32,
            Kind::Float8 { blocks: true },
            Kind::Float8 { blocks: false },
            Kind::Coded { in_tiles: true },
            Kind::Coded { in_tiles: false },
            Kind::Widened,
        ] {
            for bits in 0..16 {
                let set = |bit: u32| bits & (1 << bit) != 0;
                let (library, hopper, out_is_f32, float32) = (set(0), set(1), set(2), set(3));
                let device = Case { library, library_scales: library, hopper, on_hopper: hopper, ..HOPPER };
                let case = Case { kind, out_is_f32, float32, batch_invariant: true, ..device };
                let found = by_rows(case);
                assert_eq!(found.len(), 1, "{case:?}: {found:?}");
                assert!(!found[0].1.is_empty(), "{case:?}");
                assert!(!found[0].1.contains(&Library), "{case:?}");
            }
        }
    }

    #[test]
    fn coded_weights() {
        let coded = Case { kind: Kind::Coded { in_tiles: true }, ..HOPPER };
        let expected = [
            (1, vec![Fused, Streamed, Widened]),
            (32, vec![Streamed, Widened]),
            (48, vec![CodedTiles, Streamed, Widened]),
            (256, vec![CodedTiles, Widened]),
            (1024, vec![Widened]),
        ];
        assert_eq!(by_rows(coded), expected);
        let large = Case { outputs: 128 << 10, inputs: 8192, kind: Kind::Coded { in_tiles: false }, ..HOPPER };
        let expected = [(1, vec![Fused, Streamed, Widened]), (1024, vec![Streamed, Widened])];
        assert_eq!(by_rows(large), expected);
        let float8 = Case { kind: Kind::Float8 { blocks: false }, ..HOPPER };
        let rounded = |more: &[Path]| [&[RoundedByLibrary, RoundedByHopper][..], more].concat();
        let expected = [
            (1, vec![Fused, Streamed, Widened]),
            (16, vec![Streamed, Widened]),
            (48, rounded(&[Streamed, Widened])),
            (1024, rounded(&[Widened])),
        ];
        assert_eq!(by_rows(float8), expected);
    }

    #[test]
    fn fused_products() {
        let paths = |fusion, rows| Case { fusion, rows, ..HOPPER }.paths().collect::<Vec<_>>();
        assert_eq!(paths(Fusion::Norm, 1), [Fused]);
        assert_eq!(paths(Fusion::Norm, 2), []);
        assert_eq!(paths(Fusion::Add, 1), [Fused, Streamed]);
        assert_eq!(paths(Fusion::Add, 2), []);
        assert_eq!(paths(Fusion::Gate, 1), [Streamed]);
        assert_eq!(paths(Fusion::Gate, 9), [Hopper]);
        assert_eq!(paths(Fusion::Gate, 97), []);
        let invariant = Case { batch_invariant: true, fusion: Fusion::Gate, ..HOPPER };
        assert_eq!(by_rows(invariant), [(1024, vec![Hopper])]);
    }
}
