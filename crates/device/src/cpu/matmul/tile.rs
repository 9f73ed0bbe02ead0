//! The inner loop of every matrix product: a tile of a few rows times one panel of 32 outputs.
//!
//! [`Lanes`] has the few vector operations it needs, [`Source`] reads one stored format into them,
//! [`tile`] is the algorithm. Files named after instruction sets implement `Lanes` and enter `tile`
//! with those instructions enabled. Every (row, output) has one accumulator, which adds the
//! products in ascending order of the inner index and may be stored to `out` and loaded again
//! between blocks: a result's bits do not depend on the tile's height, on the blocking or on the
//! neighbours.

use super::super::weight::LANES;

/// One call's worth of work. Raw pointers, since the last panel is computed separately and the
/// kernels are unsafe in any case.
#[derive(Clone, Copy, Debug)]
pub struct Tile {
    /// Height, up to the instruction set's `MAX_ROWS`.
    pub rows: usize,
    /// `[steps][rows]`, 4 bytes each, an f32; for [`super::Activations::Bf16Pairs`] two bf16 in
    /// whole runs, `[steps / 16][rows][16]`.
    pub activations: *const u32,
    /// The panel's weights `[steps][32 lanes]`, in the layout of `weight`.
    pub panel: *const u8,
    /// Distance from one panel to the next.
    pub panel_bytes: usize,
    /// Panels to compute: one, or two for a single row if the kernel [takes
    /// them](super::Kernel::panels).
    pub panels: usize,
    pub steps: usize,
    /// The output, `[rows][stride]`; 32 columns of each panel are written.
    pub out: *mut f32,
    pub stride: usize,
    /// Whether there are sums of earlier steps, in `out` or in `kept`.
    pub resume: bool,
    /// For [`super::amx`] alone: sums between blocks, `[rows][32]`, or null if they are in `out`.
    pub kept: *mut f32,
    /// With `kept`: whether these are the last steps, whose sums go to `out`.
    pub last: bool,
    /// Biases, 32 values a panel that are added at the end, or null.
    pub bias: *const f32,
    pub prefetch: Prefetch,
    /// The rest is for [`super::integer`] alone. 32 values a panel that multiply the sums before
    /// the bias, or null.
    pub factors: *const f32,
    /// Inner values in a group, and groups in a step.
    pub group: usize,
    pub groups: usize,
    /// Whether groups have minimums.
    pub affine: bool,
    /// Whether scales and minimums are multiples, in front of a step's codes; otherwise they are
    /// f16 behind each group's codes.
    pub multiples: bool,
    /// Expanded multiples of all these steps, `[groups][scales, minimums][32]`, or null.
    pub numbers: *const f32,
    /// Levels of 16 codes, or in the first entry the zero of five- and six-bit codes; in the
    /// instruction set's form.
    pub table: [u8; 16],
}

impl Tile {
    /// The tile of these rows over the next panels.
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

/// Addresses to prefetch while computing: two a step, or one of them in turn, advancing. They have
/// no effect on results.
#[derive(Clone, Copy, Debug)]
pub struct Prefetch {
    pub at: *const u8,
    /// Distance from the first address of a step to the second.
    pub second: usize,
    /// Distance to the next step's addresses.
    pub advance: usize,
    /// Distance to the addresses of the next pass over a panel; 0 if the first pass prefetches all.
    pub pass: usize,
    /// For [`super::integer`]: lines to prefetch with each unit of a step, one after the other from
    /// `at` on. For [`super::amx`]: with each run of steps.
    pub lines: usize,
    /// For [`super::integer`]: prefetches at this distance ahead of all reads; 0 for none.
    pub distance: usize,
    /// For data needed a whole block later: prefetches into the second-level cache only, so that it
    /// does not evict this tile's data.
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

    /// One cache line of the next block's data a step.
    pub fn far(at: *const u8) -> Self {
        Self { at, advance: 64, far: true, ..Self::NONE }
    }

    /// The next block's data, `bytes` of it with each pass of `steps` steps, from both halves in
    /// turn: a core gets more bandwidth from two addresses than from one.
    pub fn in_turn(at: *const u8, bytes: usize, steps: usize) -> Self {
        Self { at, second: bytes / 2, advance: bytes / 2 / steps.max(1), pass: bytes, far: true, ..Self::NONE }
    }

    /// All data that is `distance` bytes ahead of the reads.
    pub fn following(distance: usize) -> Self {
        Self { distance, ..Self::NONE }
    }

    /// The prefetches of the next pass over a panel.
    pub fn of_another_pass(self) -> Self {
        match self.pass {
            0 => Self { at: self.at, far: self.far, ..Self::NONE },
            further => Self { at: self.at.wrapping_add(further), ..self },
        }
    }

    /// `lines` cache lines a unit of the next block's data.
    pub fn far_units(at: *const u8, lines: usize) -> Self {
        Self { at, lines, far: true, ..Self::NONE }
    }
}

/// The vector operations of one instruction set.
///
/// # Safety
/// All functions may be called only on machines with the instruction set, and with pointers valid
/// for [`Lanes::WIDTH`] elements (prefetch: any address).
pub unsafe trait Lanes: Copy {
    const WIDTH: usize;
    /// Whether tiles of several rows prefetch [in turn](Prefetch::in_turn).
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
    /// `self + a * b`, with one rounding if the instruction set has it.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;
    unsafe fn prefetch(at: *const u8);
    /// Prefetches into the second-level cache.
    unsafe fn prefetch_far(at: *const u8);
}

/// A stored format as the kernel reads it: inner values a step, bytes a lane and step, and how to
/// read a vector.
pub trait Source {
    const VALUES: usize;
    const LANE_BYTES: usize;
    /// # Safety
    /// As for [`Lanes`]; `from` is the address of the first lane in a step.
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

/// Multiplies `R` rows by 32 outputs, `N` vectors at a time (the panel is passed `32 / (N * WIDTH)`
/// times, so that `R * N` accumulators fit the registers). Activations are f32:
/// `[steps][VALUES][R]`.
///
/// # Safety
/// The tile's pointers are valid as documented on [`Tile`], no other thread writes its columns of
/// `out`, and the caller runs with V's instruction set enabled.
#[inline(always)]
pub unsafe fn tile<V: Lanes, S: Source, const R: usize, const N: usize>(tile: &Tile) {
    let (mut tile, mut column) = (*tile, 0);
    while column < LANES {
        // SAFETY: column + N * WIDTH <= 32 (checked below at compile time by divisibility); the
        // caller promises the rest.
        unsafe { part::<V, S, R, N, 1>(&tile, column) };
        column += N * V::WIDTH;
        tile.prefetch = tile.prefetch.of_another_pass();
    }
}

/// Multiplies one row by the outputs of `P` panels, a step of each in turn: with several read
/// streams a core has more loads in flight. Prefetches at a distance of `ahead` bytes. The sums are
/// those of [`tile`].
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

/// Some vectors of `P` panels at a time.
///
/// # Safety
/// As [`tile`]; `column + N * WIDTH <= 32`.
#[inline(always)]
unsafe fn part<V: Lanes, S: Source, const R: usize, const N: usize, const P: usize>(tile: &Tile, column: usize) {
    const { assert!(LANES.is_multiple_of(N * V::WIDTH)) };
    // SAFETY: each `panel` holds `steps` steps of LANES * LANE_BYTES bytes, `activations` R *
    // VALUES values a step, and `out` R rows of `stride` with 32 columns a panel; all offsets below
    // stay inside those. Prefetches of any address are harmless.
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

/// Calls `$kernel::<.., ROWS>` with the tile's height as a constant, for each listed height.
macro_rules! by_rows {
    ($tile:expr, $kernel:ident, [$($rows:literal)*]) => {
        match $tile.rows {
            // SAFETY: the caller of the enclosing unsafe function promises the kernel's
            // requirements.
            $($rows => unsafe { $kernel::<$rows>($tile) },)*
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}
pub(super) use by_rows;
