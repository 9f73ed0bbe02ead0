//! Chooses a kernel of `gemm_sm90.cu`, and divides its work among blocks.

/// bf16 values in one step of a kernel's ring; a step of e4m3 has twice as many.
pub const STEP: u32 = 64;
/// Rows of a box of weights, for one warpgroup.
pub const GROUP_ROWS: u32 = 64;
/// Slices are chosen for this number of multiprocessors on any device: the bits are the same
/// everywhere.
const MULTIPROCESSORS: u32 = 132;
/// Most blocks of a cluster.
const MAX_SLICES: u32 = 8;
/// Most boxes of weights of a block in a strip.
const MAX_BOXES: u32 = 8;
/// Most experts that a kernel can search for its tile.
pub const MAX_EXPERTS: u32 = 512;
/// Token tiles that use the same weights before the next weights are read.
pub const TOKEN_GROUP: i32 = 8;

/// The slices of a tile are computed by the blocks of a cluster, one each, or one after the other
/// by one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Slices,
    Tiles,
}

/// One kernel of the family, as `gemm_sm90.cu` instantiates it.
pub struct Variant {
    pub name: &'static str,
    pub kind: Kind,
    /// Warpgroups that multiply, a box of weights each.
    groups: u32,
    /// Tokens of a tile.
    pub tokens: u32,
    stages: u32,
    /// Most tiles of a strip.
    tiles: u32,
    /// Number of threads that load.
    loaders: u32,
}

#[rustfmt::skip]
pub const VARIANTS: [Variant; 19] = [
    Variant { name: "gemm90_slices1_n8", kind: Kind::Slices, groups: 1, tokens: 8, stages: 11, tiles: 1, loaders: 32 },
    Variant { name: "gemm90_slices1_n16", kind: Kind::Slices, groups: 1, tokens: 16, stages: 10, tiles: 1, loaders: 32 },
    Variant { name: "gemm90_slices1_n32", kind: Kind::Slices, groups: 1, tokens: 32, stages: 8, tiles: 1, loaders: 32 },
    Variant { name: "gemm90_slices1_n64", kind: Kind::Slices, groups: 1, tokens: 64, stages: 12, tiles: 1, loaders: 32 },
    Variant { name: "gemm90_slices1_n80", kind: Kind::Slices, groups: 1, tokens: 80, stages: 10, tiles: 1, loaders: 32 },
    Variant { name: "gemm90_slices1_n96", kind: Kind::Slices, groups: 1, tokens: 96, stages: 10, tiles: 1, loaders: 32 },
    Variant { name: "gemm90_slices1_n128", kind: Kind::Slices, groups: 1, tokens: 128, stages: 8, tiles: 1, loaders: 32 },
    Variant { name: "gemm90_slices_n8", kind: Kind::Slices, groups: 2, tokens: 8, stages: 6, tiles: 4, loaders: 32 },
    Variant { name: "gemm90_slices_n16", kind: Kind::Slices, groups: 2, tokens: 16, stages: 6, tiles: 4, loaders: 32 },
    Variant { name: "gemm90_slices_n32", kind: Kind::Slices, groups: 2, tokens: 32, stages: 5, tiles: 4, loaders: 32 },
    Variant { name: "gemm90_slices_n64", kind: Kind::Slices, groups: 2, tokens: 64, stages: 4, tiles: 1, loaders: 32 },
    Variant { name: "gemm90_slices_n96", kind: Kind::Slices, groups: 2, tokens: 96, stages: 7, tiles: 1, loaders: 32 },
    Variant { name: "gemm90_slices_n128", kind: Kind::Slices, groups: 2, tokens: 128, stages: 6, tiles: 1, loaders: 32 },
    Variant { name: "gemm90_slices4_n80", kind: Kind::Slices, groups: 4, tokens: 80, stages: 4, tiles: 1, loaders: 32 },
    Variant { name: "gemm90_tiles_n8", kind: Kind::Tiles, groups: 2, tokens: 8, stages: 6, tiles: 1, loaders: 32 },
    Variant { name: "gemm90_tiles_n16", kind: Kind::Tiles, groups: 2, tokens: 16, stages: 5, tiles: 1, loaders: 32 },
    Variant { name: "gemm90_tiles_n32", kind: Kind::Tiles, groups: 2, tokens: 32, stages: 5, tiles: 1, loaders: 32 },
    Variant { name: "gemm90_tiles_n64", kind: Kind::Tiles, groups: 2, tokens: 64, stages: 4, tiles: 1, loaders: 32 },
    Variant { name: "gemm90_tiles_n128", kind: Kind::Tiles, groups: 2, tokens: 128, stages: 6, tiles: 1, loaders: 128 },
];

impl Variant {
    fn rows(&self) -> u32 {
        self.groups * GROUP_ROWS
    }

    /// Name of the corresponding kernel for e4m3 on both sides.
    pub fn float8_name(&self) -> String {
        self.name.replace("gemm90_", "gemm90_fp8_")
    }

    pub fn threads(&self) -> u32 {
        self.groups * 128 + self.loaders
    }

    pub fn shared_bytes(&self) -> u32 {
        let ring = self.stages * (self.rows() + self.tokens) * 128;
        let rest = match self.kind {
            Kind::Slices => 0,
            // Memory for transposed results, and for the experts' first tiles.
            Kind::Tiles => self.groups * 4 * 640 + (MAX_EXPERTS + 4) * 4,
        };
        1024 + ring + rest + 2 * 8 * self.stages
    }
}

/// Number of slices of k, of four steps or more each: the fewest that give most multiprocessors one
/// block of boxes. It depends on the shape alone.
pub fn slices(n: u32, k: u32, step: u32) -> u32 {
    let (boxes, steps) = (n.div_ceil(GROUP_ROWS), k.div_ceil(step));
    let (mut best, mut best_even) = (1, 0.0);
    let mut slices = 1;
    while slices <= MAX_SLICES && (slices == 1 || steps >= 4 * slices) {
        let each = (boxes * slices).div_ceil(MULTIPROCESSORS);
        if each > MAX_BOXES {
            break;
        }
        let even = f64::from(boxes * slices) / f64::from(each * MULTIPROCESSORS);
        if even > best_even + 0.02 {
            (best, best_even) = (slices, even);
        }
        if even >= 0.7 {
            break;
        }
        slices *= 2;
    }
    best
}

/// The chosen kernel, and the division of its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub which: usize,
    /// Weight rows of a strip.
    pub height: u32,
    pub grid: [u32; 2],
}

impl Plan {
    /// Whether strips of a weight of `n` rows can be boxes of its first half and of its second in
    /// turn.
    pub fn pairs(&self, n: u32) -> bool {
        let variant = &VARIANTS[self.which];
        let even = |rows: u32| rows.is_multiple_of(2 * GROUP_ROWS);
        let is_made = variant.kind == Kind::Slices && variant.groups > 1 && (16..=96).contains(&variant.tokens);
        is_made && even(self.height) && even(n)
    }
}

/// Few rows use strips, so that every multiprocessor reads the same amount. Many rows, or weights
/// that fill the device many times over, use tiles.
pub fn dense_plan(n: u32, slices: u32, rows: u32, multiprocessors: u32) -> Plan {
    let boxes = (n.div_ceil(GROUP_ROWS) * slices).div_ceil(multiprocessors);
    let groups = match rows {
        0..=32 if boxes <= MAX_BOXES => Some(boxes.min(2)),
        // Sixteen sequences that verify drafts of four: a frequent step, for which a second wave of
        // blocks would cost most.
        65..=80 if boxes > 2 => Some(4),
        33..=96 => Some(boxes.min(2)),
        97..=128 if slices > 1 || boxes == 1 => Some(boxes.min(2)),
        129..=256 if slices > 1 && boxes == 1 => Some(2),
        _ => None,
    };
    let Some(groups) = groups else {
        let which = variant(Kind::Tiles, 2, rows);
        let tiles = n.div_ceil(VARIANTS[which].rows()) * rows.div_ceil(VARIANTS[which].tokens);
        return Plan { which, height: 0, grid: [tiles.min(multiprocessors), 1] };
    };
    let which = variant(Kind::Slices, groups, rows);
    let height = boxes.clamp(groups, groups * VARIANTS[which].tiles) * GROUP_ROWS;
    Plan { which, height, grid: [n.div_ceil(height) * slices, rows.div_ceil(VARIANTS[which].tokens)] }
}

/// The smallest of a kind that holds this number of tokens, or the largest.
fn variant(kind: Kind, groups: u32, tokens: u32) -> usize {
    let of_kind = |variant: &Variant| variant.kind == kind && variant.groups == groups;
    let holds = |variant: &Variant| of_kind(variant) && variant.tokens >= tokens;
    let largest = || VARIANTS.iter().rposition(of_kind);
    VARIANTS.iter().position(holds).or_else(largest).expect("kernels of all kinds")
}

/// Chosen by the rows that an expert has on average, with room for experts that have more.
pub fn grouped_variant(rows: u32, experts: u32) -> usize {
    variant(Kind::Tiles, 2, rows / experts * 3 / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_follow_from_the_shape() {
        let cases = [
            ((4096, 4096), 2),
            ((6144, 4096), 1),
            ((28672, 4096), 1),
            ((4096, 14336), 2),
            ((128_256, 4096), 1),
            ((8192, 8192), 1),
            ((128, 2048), 8),
            ((8, 8), 1),
        ];
        for ((n, k), expected) in cases {
            assert_eq!(slices(n, k, STEP), expected, "[{n}, {k}]");
        }
    }

    #[test]
    fn blocks_fit_on_a_multiprocessor() {
        for variant in &VARIANTS {
            // For few tokens two blocks share a multiprocessor, if there are more blocks than
            // multiprocessors; with one warpgroup there are not.
            let alone = variant.tokens > 64 || (variant.tokens == 64 && variant.groups == 1);
            // The small kernels between products fit beside a single block, so that its weights are
            // loaded while they run.
            let most = if alone { 208 << 10 } else { 113 << 10 };
            assert!(variant.shared_bytes() <= most, "{}: {}", variant.name, variant.shared_bytes());
        }
    }

    #[test]
    fn few_rows_have_one_block_a_multiprocessor() {
        let cases = [
            ((4096, 2, 1), "gemm90_slices1_n8", 64, [128, 1]),
            ((6144, 1, 16), "gemm90_slices1_n16", 64, [96, 1]),
            ((28672, 1, 32), "gemm90_slices_n32", 256, [112, 1]),
            ((28672, 1, 64), "gemm90_slices_n64", 128, [224, 1]),
            ((6144, 1, 80), "gemm90_slices1_n80", 64, [96, 1]),
            ((28672, 1, 80), "gemm90_slices4_n80", 256, [112, 1]),
            ((6144, 1, 81), "gemm90_slices1_n96", 64, [96, 1]),
            ((28672, 1, 96), "gemm90_slices_n96", 128, [224, 1]),
            ((4096, 2, 100), "gemm90_slices1_n128", 64, [128, 1]),
            ((4096, 2, 256), "gemm90_slices_n128", 128, [64, 2]),
            ((28672, 1, 100), "gemm90_tiles_n128", 0, [132, 1]),
            ((128_256, 1, 1), "gemm90_tiles_n8", 0, [132, 1]),
            ((4096, 2, 300), "gemm90_tiles_n128", 0, [96, 1]),
        ];
        for ((n, slices, rows), name, height, grid) in cases {
            let plan = dense_plan(n, slices, rows, 132);
            assert_eq!((VARIANTS[plan.which].name, plan.height, plan.grid), (name, height, grid), "{rows} rows of {n}");
        }
    }

    #[test]
    fn gates_meet_their_ups_where_strips_are_even() {
        let pairs = |n: u32, rows| dense_plan(n, 1, rows, 132).pairs(n);
        assert!([16, 32, 64, 80, 96].map(|rows| pairs(28672, rows)) == [true; 5]);
        assert!(!pairs(28672, 8) && !pairs(28672, 100), "kernels that do not gate");
        assert!(!pairs(6144, 16), "a box a block");
        assert!(!pairs(3 * 132 * 64, 16), "three boxes a block");
        assert!(pairs(2 * 132 * 64, 16) && !pairs(2 * 132 * 64 - 64, 16), "half a pair");
    }

    #[test]
    fn experts_have_tiles_for_their_rows() {
        for (rows, tokens) in [(8, 8), (512, 8), (2048, 32), (65536, 128)] {
            assert_eq!(VARIANTS[grouped_variant(rows, 128)].tokens, tokens, "{rows} rows over 128 experts");
        }
    }
}
