//! The inner loop of every matrix product: a tile of a few rows times one panel of 32 outputs.
//!
//! [`Lanes`] is the handful of vector operations it needs, [`Source`] reads one stored format into them, [`tile`] is
//! the algorithm. Files named after instruction sets implement `Lanes` and enter `tile` with those instructions
//! enabled. Every (row, output) has one accumulator, which adds the products in ascending order of the inner index
//! and may be stored to `out` and loaded again between blocks: a result's bits do not depend on the tile's height, on
//! the blocking or on the neighbours.

use super::super::weight::LANES;

/// One call's worth of work. Pointers, since the last panel is computed apart and the kernels are unsafe in any case.
#[derive(Clone, Copy, Debug)]
pub struct Tile {
    /// Height, up to the instruction set's `MAX_ROWS`.
    pub rows: usize,
    /// `[steps][rows]`, 4 bytes each, an f32; for [`super::Activations::Bf16Pairs`] two bf16 in whole runs,
    /// `[steps / 16][rows][16]`.
    pub activations: *const u32,
    /// `[steps][32 lanes]`, see `weight.rs`.
    pub panel: *const u8,
    /// From one panel to the next.
    pub panel_bytes: usize,
    /// How many to compute: one, or two of one row where the kernel [takes them](super::Kernel::panels).
    pub panels: usize,
    pub steps: usize,
    /// `[rows][stride]`, of which 32 columns a panel are written.
    pub out: *mut f32,
    pub stride: usize,
    /// Whether there are sums of earlier steps: in `out`, or where they are kept.
    pub resume: bool,
    /// For [`super::amx`] alone: where sums are kept between blocks, `[rows][32]`, or null where that is `out`.
    pub kept: *mut f32,
    /// With this, whether these are the last steps, whose sums go to `out`.
    pub last: bool,
    /// 32 values a panel added at the end, or null.
    pub bias: *const f32,
    pub prefetch: Prefetch,
    /// The rest is for [`super::integer`] alone. 32 values a panel that multiply the sums before the bias, or null.
    pub factors: *const f32,
    /// Inner values in a group, and groups in a step.
    pub group: usize,
    pub groups: usize,
    /// Whether groups have minimums.
    pub affine: bool,
    /// Whether scales and minimums are multiples, in front of a step's codes; otherwise f16 behind each group's.
    pub multiples: bool,
    /// Multiples of all these steps multiplied out, `[groups][scales, minimums][32]`, or null.
    pub numbers: *const f32,
    /// Levels of 16 codes, or first of all the zero of five- and six-bit codes; as the instruction set wants them.
    pub table: [u8; 16],
}

impl Tile {
    /// The same rows over the panels behind these.
    #[inline(always)]
    pub fn next(self) -> Self {
        let (lanes, bytes) = (self.panels * LANES, self.panels * self.panel_bytes);
        let further = |values: *const f32| if values.is_null() { values } else { values.wrapping_add(lanes) };
        Self {
            panel: self.panel.wrapping_add(bytes),
            prefetch: Prefetch { at: self.prefetch.at.wrapping_add(bytes), ..self.prefetch },
            out: self.out.wrapping_add(lanes),
            bias: further(self.bias),
            factors: further(self.factors),
            ..self
        }
    }
}

/// What to fetch into cache while computing: two addresses a step, or one of them in turn, advancing. Without effect on
/// results.
#[derive(Clone, Copy, Debug)]
pub struct Prefetch {
    pub at: *const u8,
    /// Distance from the first address of a step to the second.
    pub second: usize,
    /// Distance to the next step's.
    pub advance: usize,
    /// Distance to those of the next pass over a panel; 0 where the first one fetches all.
    pub pass: usize,
    /// For [`super::integer`]: lines to fetch with each unit of a step, one after the other from `at` on. For [`super::amx`] with
    /// each run of steps.
    pub lines: usize,
    /// For [`super::integer`]: fetches what lies so far ahead of all that is read; 0 for nothing.
    pub distance: usize,
    /// Wanted a whole block later: into the second-level cache only, so that it does not push out what this tile uses.
    pub far: bool,
}

impl Prefetch {
    const NONE: Self = Self { at: std::ptr::null(), second: 0, advance: 0, pass: 0, lines: 0, distance: 0, far: false };

    /// `lines` cache lines a step, 0, 1 or 2, that are needed soon.
    pub fn near(at: *const u8, lines: usize) -> Self {
        match lines {
            0 => Self { at, ..Self::NONE },
            1 => Self { at, advance: 64, ..Self::NONE },
            _ => Self { at, second: 64, advance: 128, ..Self::NONE },
        }
    }

    /// One cache line a step of what the next block needs.
    pub fn far(at: *const u8) -> Self {
        Self { at, advance: 64, far: true, ..Self::NONE }
    }

    /// What the next block needs, `bytes` of it with each pass of `steps` steps, from both halves in turn: memory gives a
    /// core more from two places than from one.
    pub fn in_turn(at: *const u8, bytes: usize, steps: usize) -> Self {
        Self { at, second: bytes / 2, advance: bytes / 2 / steps.max(1), pass: bytes, far: true, ..Self::NONE }
    }

    /// All that lies `distance` bytes ahead.
    pub fn following(distance: usize) -> Self {
        Self { distance, ..Self::NONE }
    }

    /// What the next pass over a panel fetches.
    pub fn of_another_pass(self) -> Self {
        match self.pass {
            0 => Self { at: self.at, far: self.far, ..Self::NONE },
            further => Self { at: self.at.wrapping_add(further), ..self },
        }
    }

    /// `lines` cache lines a unit of what the next block needs.
    pub fn far_units(at: *const u8, lines: usize) -> Self {
        Self { at, lines, far: true, ..Self::NONE }
    }
}

/// The vector operations of one instruction set.
///
/// # Safety
/// All functions may be called only where the instruction set is there, and with pointers valid for
/// [`Lanes::WIDTH`] elements (prefetch: any address).
pub unsafe trait Lanes: Copy {
    const WIDTH: usize;
    /// Whether tiles of several rows fetch [in turn](Prefetch::in_turn).
    const IN_TURN: bool = false;
    unsafe fn zero() -> Self;
    unsafe fn splat(value: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn load_f16(from: *const u8) -> Self;
    unsafe fn load_i8(from: *const i8) -> Self;
    /// First values of `WIDTH` pairs of bf16.
    unsafe fn load_bf16_first(from: *const u8) -> Self;
    /// Second values of `WIDTH` pairs of bf16.
    unsafe fn load_bf16_second(from: *const u8) -> Self;
    unsafe fn store(self, to: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// `self + a * b`, in one rounding where the instruction set has it.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;
    unsafe fn prefetch(at: *const u8);
    /// Into the second-level cache.
    unsafe fn prefetch_far(at: *const u8);
}

/// A stored format as the kernel sees it: inner values a step, bytes a lane and step, and how to read a vector.
pub trait Source {
    const VALUES: usize;
    const LANE_BYTES: usize;
    /// # Safety
    /// As for [`Lanes`]; `from` is the first lane's place in a step.
    unsafe fn read<V: Lanes>(from: *const u8, value: usize) -> V;
}

pub struct F32;
pub struct F16;
pub struct Bf16;

impl Source for F32 {
    const VALUES: usize = 1;
    const LANE_BYTES: usize = 4;
    #[inline(always)]
    unsafe fn read<V: Lanes>(from: *const u8, _: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(from.cast()) }
    }
}

impl Source for F16 {
    const VALUES: usize = 1;
    const LANE_BYTES: usize = 2;
    #[inline(always)]
    unsafe fn read<V: Lanes>(from: *const u8, _: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_f16(from) }
    }
}

impl Source for Bf16 {
    const VALUES: usize = 2;
    const LANE_BYTES: usize = 4;
    #[inline(always)]
    unsafe fn read<V: Lanes>(from: *const u8, value: usize) -> V {
        // SAFETY: the caller's promise.
        unsafe { if value == 0 { V::load_bf16_first(from) } else { V::load_bf16_second(from) } }
    }
}

/// `R` rows by 32 outputs, `N` vectors at a time (the panel is passed `32 / (N * WIDTH)` times, so that `R * N`
/// accumulators fit the registers). Activations are f32: `[steps][VALUES][R]`.
///
/// # Safety
/// The tile's pointers are valid for what [`Tile`] says, nobody else writes its columns of `out`, and the caller runs
/// with V's instruction set enabled.
#[inline(always)]
pub unsafe fn tile<V: Lanes, S: Source, const R: usize, const N: usize>(tile: &Tile) {
    let (mut tile, mut column) = (*tile, 0);
    while column < LANES {
        // SAFETY: column + N * WIDTH <= 32 (checked below at compile time by divisibility), the rest is the caller's.
        unsafe { part::<V, S, R, N, 1>(&tile, column) };
        column += N * V::WIDTH;
        tile.prefetch = tile.prefetch.of_another_pass();
    }
}

/// One row by the outputs of `P` panels, in steps of each in turn: of what a core reads from several places, it has more
/// under way. Fetches what lies `ahead` bytes further on. The sums are those of [`tile`].
///
/// # Safety
/// As for [`tile`], with `P` panels.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub unsafe fn row<V: Lanes, S: Source, const N: usize, const P: usize>(tile: &Tile, ahead: usize) {
    const { assert!(N * V::WIDTH == LANES) };
    let prefetch = Prefetch::near(tile.panel.wrapping_add(ahead), LANES * S::LANE_BYTES / 64);
    // SAFETY: the caller's promise.
    unsafe { part::<V, S, 1, N, P>(&Tile { prefetch, ..*tile }, 0) }
}

/// Of `P` panels at once.
///
/// # Safety
/// As [`tile`]; `column + N * WIDTH <= 32`.
#[inline(always)]
unsafe fn part<V: Lanes, S: Source, const R: usize, const N: usize, const P: usize>(tile: &Tile, column: usize) {
    const { assert!(LANES.is_multiple_of(N * V::WIDTH)) };
    // SAFETY: each `panel` holds `steps` steps of LANES * LANE_BYTES bytes, `activations` R * VALUES values a step, and
    // `out` R rows of `stride` with 32 columns a panel; all offsets below stay inside those. Prefetching may go anywhere.
    unsafe {
        let out = tile.out.add(column);
        let mut sums = [[[V::zero(); N]; R]; P];
        if tile.resume {
            for p in 0..P {
                for r in 0..R {
                    for n in 0..N {
                        sums[p][r][n] = V::load(out.add(r * tile.stride + p * LANES + n * V::WIDTH));
                    }
                }
            }
        }
        let mut activations = tile.activations.cast::<f32>();
        let mut panel = tile.panel.add(column * S::LANE_BYTES);
        let mut ahead = tile.prefetch.at;
        let mut turn = 0;
        for _ in 0..tile.steps {
            for p in 0..P {
                let (panel, ahead) = (panel.add(p * tile.panel_bytes), ahead.wrapping_add(p * tile.panel_bytes));
                if V::IN_TURN && R > 1 {
                    V::prefetch_far(ahead.wrapping_add(turn));
                    turn ^= tile.prefetch.second;
                } else if tile.prefetch.far {
                    V::prefetch_far(ahead);
                } else {
                    V::prefetch(ahead);
                    V::prefetch(ahead.wrapping_add(tile.prefetch.second));
                }
                for value in 0..S::VALUES {
                    let mut weights = [V::zero(); N];
                    for n in 0..N {
                        weights[n] = S::read::<V>(panel.add(n * V::WIDTH * S::LANE_BYTES), value);
                    }
                    for r in 0..R {
                        let activation = V::splat(*activations.add(value * R + r));
                        for n in 0..N {
                            sums[p][r][n] = sums[p][r][n].add_product(weights[n], activation);
                        }
                    }
                }
            }
            ahead = ahead.wrapping_add(tile.prefetch.advance);
            activations = activations.add(S::VALUES * R);
            panel = panel.add(LANES * S::LANE_BYTES);
        }
        for p in 0..P {
            for r in 0..R {
                for n in 0..N {
                    let mut sum = sums[p][r][n];
                    if !tile.bias.is_null() {
                        sum = sum.add(V::load(tile.bias.add(p * LANES + column + n * V::WIDTH)));
                    }
                    sum.store(out.add(r * tile.stride + p * LANES + n * V::WIDTH));
                }
            }
        }
    }
}

/// Calls `$kernel::<.., ROWS>` with the tile's height as a constant, for each height listed.
macro_rules! by_rows {
    ($tile:expr, $kernel:ident, [$($rows:literal)*]) => {
        match $tile.rows {
            // SAFETY: the caller of the enclosing unsafe function promises what the kernel asks.
            $($rows => unsafe { $kernel::<$rows>($tile) },)*
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}
pub(super) use by_rows;
