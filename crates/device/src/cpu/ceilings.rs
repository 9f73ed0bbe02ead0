//! Measured peaks of this machine: `folio bench` compares its figures with them.
//!
//! Bandwidth is a plain read by all threads; peaks are multiply-adds between registers. Each call
//! is one short measurement, to be interleaved with the runs that are compared; the best of the
//! measurements counts.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::Isa;
use super::buffer::Buffer;
use super::pool::{Disjoint, Pool, even_split};
use crate::Result;

/// Memory that all threads read repeatedly. Use at least 2 GiB, so that no cache holds a
/// significant part.
pub struct Reader {
    pool: Pool,
    isa: Isa,
    data: Buffer<u8>,
}

impl Reader {
    pub fn new(threads: usize, bytes: usize) -> Result<Self> {
        let pool = Pool::new(threads)?;
        let mut data = Buffer::zeroed("the bandwidth test", bytes)?;
        // Untouched memory would be one shared page of zeros; the threads that will read a part
        // write it first.
        let target = Disjoint::new(&mut data);
        pool.run(|thread, threads| {
            // SAFETY: the threads' parts do not overlap.
            unsafe { target.part(even_split(bytes, threads, thread)) }.fill(1);
        });
        Ok(Self { pool, isa: Isa::best(), data })
    }

    /// Reads everything once; returns bytes per second.
    pub fn pass(&self) -> f64 {
        let (data, isa) = (&*self.data, self.isa);
        let start = Instant::now();
        self.pool.run(|thread, threads| {
            black_box(read(isa, &data[even_split(data.len(), threads, thread)]));
        });
        data.len() as f64 / start.elapsed().as_secs_f64()
    }
}

/// The best of `passes` plain reads of `bytes` bytes by all threads, in bytes per second.
pub fn read_bandwidth(threads: usize, bytes: usize, passes: usize) -> Result<f64> {
    let reader = Reader::new(threads, bytes)?;
    Ok((0..passes).map(|_| reader.pass()).fold(0.0, f64::max))
}

/// Floating-point operations per second of f32 multiply-adds on all threads; 0 if the threads
/// cannot be started.
pub fn f32_peak(threads: usize) -> f64 {
    peak(threads, Isa::best(), f32_burst)
}

/// Operations per second of products of bf16 summed in f32: with tile registers or the dot-product
/// instruction if the machine has them, else with f32.
pub fn bf16_peak(threads: usize) -> f64 {
    peak(threads, Isa::best(), bf16_burst)
}

/// Integer operations per second of products of bytes summed in 32 bits: with the dot-product
/// instruction if the machine has it, or AVX2's three instructions for it, else with f32.
pub fn int8_peak(threads: usize) -> f64 {
    peak(threads, Isa::best(), int8_burst)
}

/// Runs the burst on every thread for some tens of milliseconds; a burst returns the number of its
/// operations.
fn peak(threads: usize, isa: Isa, burst: fn(Isa, usize) -> u64) -> f64 {
    const ROUNDS: usize = 4_000_000;
    let Ok(pool) = Pool::new(threads) else { return 0.0 };
    // After the first fork the threads run and the clock is up.
    pool.run(|_, _| {
        black_box(burst(isa, ROUNDS / 16));
    });
    let operations = AtomicU64::new(0);
    let start = Instant::now();
    pool.run(|_, _| {
        operations.fetch_add(burst(isa, ROUNDS), Ordering::Relaxed);
    });
    operations.into_inner() as f64 / start.elapsed().as_secs_f64()
}

fn read(isa: Isa, data: &[u8]) -> u64 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` is one of `Isa::available`.
        Isa::Avx512 | Isa::Amx => unsafe { x86::read_avx512(data) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { x86::read_avx2(data) },
        _ => read_plain(data),
    }
}

/// Four independent sums over the data's words; the compiler vectorizes the loop for the baseline
/// target.
fn read_plain(data: &[u8]) -> u64 {
    let (words, _) = data.as_chunks::<8>();
    let (groups, _) = words.as_chunks::<4>();
    let mut sums = [0u64; 4];
    for group in groups {
        for (sum, word) in sums.iter_mut().zip(group) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

fn f32_burst(isa: Isa, rounds: usize) -> u64 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` is one of `Isa::available`.
        Isa::Avx512 | Isa::Amx => unsafe { x86::f32_avx512(rounds) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { x86::f32_avx2(rounds) },
        _ => f32_plain(rounds),
    }
}

fn bf16_burst(isa: Isa, rounds: usize) -> u64 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` is one of `Isa::available`.
        Isa::Avx512 => unsafe { x86::bf16_avx512(rounds) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Amx => unsafe { x86::bf16_amx(rounds) },
        _ => f32_burst(isa, rounds),
    }
}

fn int8_burst(isa: Isa, rounds: usize) -> u64 {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` is one of `Isa::available`.
        Isa::Avx512 | Isa::Amx => unsafe { x86::int8_avx512(rounds) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { x86::int8_avx2(rounds) },
        _ => f32_burst(isa, rounds),
    }
}

fn f32_plain(rounds: usize) -> u64 {
    const CHAINS: usize = 32;
    let (a, b) = (black_box(0.5f32), black_box(0.25f32));
    let mut sums = [0.0f32; CHAINS];
    for _ in 0..rounds / 8 {
        for sum in &mut sums {
            *sum = *sum * a + b;
        }
    }
    black_box(sums);
    (rounds / 8 * CHAINS * 2) as u64
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::super::tiles::{self, ROW_BYTES, ROWS, Shapes, multiply};

    /// # Safety
    /// The machine has AMX with BF16.
    pub unsafe fn bf16_amx(rounds: usize) -> u64 {
        const CHAINS: usize = 4;
        // SAFETY: the caller's promise.
        unsafe {
            Shapes::WHOLE.enter();
            for _ in 0..rounds / 16 {
                multiply!("tdpbf16ps", 0, 4, 6);
                multiply!("tdpbf16ps", 1, 4, 7);
                multiply!("tdpbf16ps", 2, 5, 6);
                multiply!("tdpbf16ps", 3, 5, 7);
            }
            tiles::leave();
        }
        (rounds / 16 * CHAINS * ROWS * ROWS * ROW_BYTES) as u64
    }

    /// # Safety
    /// The machine has AVX-512.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn read_avx512(data: &[u8]) -> u64 {
        let (groups, _) = data.as_chunks::<256>();
        let mut sums = [_mm512_setzero_si512(); 4];
        for group in groups {
            for (index, sum) in sums.iter_mut().enumerate() {
                // SAFETY: four vectors of 64 bytes lie inside the group of 256.
                let line = unsafe { _mm512_loadu_si512(group.as_ptr().add(64 * index).cast()) };
                *sum = _mm512_or_si512(*sum, line);
            }
        }
        let sum = _mm512_or_si512(_mm512_or_si512(sums[0], sums[1]), _mm512_or_si512(sums[2], sums[3]));
        _mm512_reduce_or_epi64(sum) as u64
    }

    /// # Safety
    /// The machine has AVX2.
    #[target_feature(enable = "avx2")]
    pub unsafe fn read_avx2(data: &[u8]) -> u64 {
        let (groups, _) = data.as_chunks::<128>();
        let mut sums = [_mm256_setzero_si256(); 4];
        for group in groups {
            for (index, sum) in sums.iter_mut().enumerate() {
                // SAFETY: four vectors of 32 bytes lie inside the group of 128.
                let part = unsafe { _mm256_loadu_si256(group.as_ptr().add(32 * index).cast()) };
                *sum = _mm256_or_si256(*sum, part);
            }
        }
        let sum = _mm256_or_si256(_mm256_or_si256(sums[0], sums[1]), _mm256_or_si256(sums[2], sums[3]));
        let mut words = [0u64; 4];
        // SAFETY: room for 32 bytes.
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), sum) };
        words.into_iter().fold(0, |all, word| all | word)
    }

    /// Enough chains to hide the latency of any multiply-add, few enough to stay in registers.
    const CHAINS: usize = 24;

    /// # Safety
    /// The machine has AVX-512.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn f32_avx512(rounds: usize) -> u64 {
        let (a, b) = (_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(black_box(0.25)));
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(a, b, *sum);
            }
            // Without this the compiler could compute the sums of equal terms in advance.
            keep512(&mut sums);
        }
        black_box(sums);
        (rounds * CHAINS * 32) as u64
    }

    /// # Safety
    /// The machine has AVX-512 with BF16.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub unsafe fn bf16_avx512(rounds: usize) -> u64 {
        let ones = _mm512_set1_epi32(black_box(0x3f80_3f80));
        // SAFETY: both are 64 plain bytes.
        let ones: __m512bh = unsafe { std::mem::transmute(ones) };
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, ones, ones);
            }
            keep512(&mut sums);
        }
        black_box(sums);
        (rounds * CHAINS * 64) as u64
    }

    /// # Safety
    /// The machine has AVX-512 with VNNI.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub unsafe fn int8_avx512(rounds: usize) -> u64 {
        let ones = _mm512_set1_epi32(black_box(0x0101_0101));
        let mut sums = [_mm512_setzero_si512(); CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, ones, ones);
            }
            // SAFETY: an empty instruction sequence that names a register changes nothing.
            unsafe { std::arch::asm!("/* {} */", in(zmm_reg) sums[0], options(nomem, nostack, preserves_flags)) };
        }
        black_box(sums);
        (rounds * CHAINS * 128) as u64
    }

    /// # Safety
    /// The machine has AVX2 and FMA.
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn f32_avx2(rounds: usize) -> u64 {
        const CHAINS: usize = 12;
        let (a, b) = (_mm256_set1_ps(black_box(0.5)), _mm256_set1_ps(black_box(0.25)));
        let mut sums = [_mm256_setzero_ps(); CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(a, b, *sum);
            }
            // SAFETY: an empty instruction sequence that names the registers changes nothing.
            unsafe { std::arch::asm!("/* {} */", in(ymm_reg) sums[0], options(nomem, nostack, preserves_flags)) };
        }
        black_box(sums);
        (rounds * CHAINS * 16) as u64
    }

    /// # Safety
    /// The machine has AVX2.
    #[target_feature(enable = "avx2")]
    pub unsafe fn int8_avx2(rounds: usize) -> u64 {
        const CHAINS: usize = 12;
        let (bytes, ones) = (_mm256_set1_epi8(1), _mm256_set1_epi16(1));
        let mut sums = [_mm256_setzero_si256(); CHAINS];
        for _ in 0..rounds {
            for sum in &mut sums {
                // SAFETY: only registers are used. In assembly, because the compiler could hoist
                // the product, which is always the same.
                unsafe {
                    std::arch::asm!(
                        "vpmaddubsw {product}, {bytes}, {bytes}",
                        "vpmaddwd {product}, {product}, {ones}",
                        "vpaddd {sum}, {sum}, {product}",
                        sum = inout(ymm_reg) *sum,
                        bytes = in(ymm_reg) bytes,
                        ones = in(ymm_reg) ones,
                        product = out(ymm_reg) _,
                        options(pure, nomem, nostack, preserves_flags),
                    );
                }
            }
        }
        black_box(sums);
        (rounds * CHAINS * 64) as u64
    }

    #[target_feature(enable = "avx512f")]
    fn keep512(sums: &mut [__m512; CHAINS]) {
        // SAFETY: an empty instruction sequence that names a register changes nothing.
        unsafe { std::arch::asm!("/* {} */", in(zmm_reg) sums[0], options(nomem, nostack, preserves_flags)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ceiling_is_a_number() {
        let mut figures = vec![read_bandwidth(2, 1 << 20, 2).unwrap(), f32_peak(1), bf16_peak(2), int8_peak(2)];
        for isa in Isa::available() {
            let data = vec![1u8; 1 << 12];
            assert_ne!(read(isa, &data), 0);
            figures.push(f32_burst(isa, 1000) as f64);
            figures.push(bf16_burst(isa, 1000) as f64);
            figures.push(int8_burst(isa, 1000) as f64);
        }
        assert!(figures.iter().all(|figure| figure.is_finite() && *figure > 0.0), "{figures:?}");
    }
}
