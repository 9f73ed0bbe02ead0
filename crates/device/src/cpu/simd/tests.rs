//! Every instruction set of this machine against plain f64 arithmetic and against the scalar twin.

use half::{bf16, f16};

use super::*;

#[derive(Clone, Copy, Debug)]
enum Op {
    Exp,
    Exp2,
    Sigmoid,
    Tanh,
    Erf,
}

struct Map<'a>(Op, &'a [f32], &'a mut [f32]);

impl Kernel for Map<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (from, to) in self.1.chunks(LANES).zip(self.2.chunks_mut(LANES)) {
            let x = s.read(from);
            let y = match self.0 {
                Op::Exp => exp(s, x),
                Op::Exp2 => exp2(s, x),
                Op::Sigmoid => sigmoid(s, x),
                Op::Tanh => tanh(s, x),
                Op::Erf => erf(s, x),
            };
            s.write(to, y);
        }
    }
}

fn map(isa: Isa, op: Op, x: &[f32]) -> Vec<f32> {
    let mut y = vec![0.0; x.len()];
    dispatch(isa, Map(op, x, &mut y));
    y
}

/// Simpson's rule; slow, plain and independent of the polynomials.
fn plain_erf(x: f64) -> f64 {
    let (steps, mut sum) = (2000, 0.0);
    let width = x / f64::from(steps);
    for i in 0..=steps {
        let weight = if i == 0 || i == steps {
            1.0
        } else if i % 2 == 1 {
            4.0
        } else {
            2.0
        };
        let t = width * f64::from(i);
        sum += weight * (-t * t).exp();
    }
    sum * width / 3.0 * 2.0 / std::f64::consts::PI.sqrt()
}

fn plain(op: Op, x: f64) -> f64 {
    match op {
        Op::Exp => x.exp(),
        Op::Exp2 => x.exp2(),
        Op::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Op::Tanh => x.tanh(),
        Op::Erf => plain_erf(x),
    }
}

#[test]
fn functions_are_good_to_two_ulp() {
    for isa in Isa::available() {
        let functions = [(Op::Exp, 87.0f32), (Op::Exp2, 126.0), (Op::Sigmoid, 80.0), (Op::Tanh, 12.0), (Op::Erf, 5.0)];
        for (op, limit) in functions {
            let x: Vec<f32> = (0..4001).map(|i| (i as f32 / 2000.0 - 1.0).powi(3) * limit).collect();
            for (x, y) in x.iter().zip(map(isa, op, &x)) {
                let expected = plain(op, f64::from(*x));
                let ulp = f64::from((expected as f32).abs().max(f32::MIN_POSITIVE)) * f64::from(f32::EPSILON);
                let error = (f64::from(y) - expected).abs() / ulp;
                assert!(error < 2.5, "{isa:?} {op:?}({x}) = {y}, expected {expected}: {error} ulp");
            }
        }
    }
}

#[test]
fn ends_of_the_range() {
    let x = [0.0, -0.0, f32::NEG_INFINITY, f32::INFINITY, -88.0, -200.0, 89.0, 1e30, -1e30, f32::NAN];
    for isa in Isa::available() {
        let y = map(isa, Op::Exp, &x);
        let inf = f32::INFINITY;
        assert_eq!(y[..9], [1.0, 1.0, 0.0, inf, 0.0, 0.0, inf, inf, 0.0], "{isa:?}");
        assert!(y[9].is_nan(), "{isa:?}");
        let y = map(isa, Op::Exp2, &[0.0, -0.0, -1e30, f32::NEG_INFINITY, -200.0, 127.0, f32::NAN]);
        assert_eq!(y[..6], [1.0, 1.0, 0.0, 0.0, 0.0, 2f32.powi(127)], "{isa:?}");
        assert!(y[6].is_nan(), "{isa:?}");
        let y = map(isa, Op::Sigmoid, &x);
        assert!(y[4] < 1e-38, "{isa:?}");
        assert_eq!(y[..4], [0.5, 0.5, 0.0, 1.0], "{isa:?}");
        assert_eq!(y[5..9], [0.0, 1.0, 1.0, 0.0], "{isa:?}");
        assert_eq!(map(isa, Op::Tanh, &x)[..9], [0.0, 0.0, -1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0]);
        assert_eq!(map(isa, Op::Erf, &x)[..9], [0.0, 0.0, -1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0]);
        for op in [Op::Sigmoid, Op::Tanh, Op::Erf] {
            assert!(map(isa, op, &x)[9].is_nan(), "{isa:?} {op:?}");
        }
    }
}

struct Lanes<'a>(&'a [f32; 16], &'a [[u16; 2]; 16], &'a [u16; 16]);

impl Kernel for Lanes<'_> {
    type Output = (f32, f32, [[f32; 16]; 2], [f32; 16]);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let x = s.read(self.0);
        let (mut bf, mut hf) = ([[0.0; 16]; 2], [0.0; 16]);
        // SAFETY: every array has sixteen elements.
        unsafe {
            let halves = s.halves(s.load(self.1.as_ptr().cast()));
            bf.iter_mut().zip(halves).for_each(|(lanes, half)| s.write(lanes, half));
            s.store(hf.as_mut_ptr(), s.load_f16(self.2.as_ptr()));
        }
        (s.sum(x), s.largest(x), bf, hf)
    }
}

#[test]
fn lanes_are_summed_and_widened_alike() {
    let values: [f32; 16] = std::array::from_fn(|i| ((i * 37 % 16) as f32 - 7.3) * 1.1e3_f32.powi(i as i32 % 3));
    let bf = values.map(|v| [bf16::from_f32(v).to_bits(), bf16::from_f32(v / -3.0).to_bits()]);
    // One is subnormal and one infinite.
    let mut hf = values.map(|v| f16::from_f32(v).to_bits());
    hf[3] = 0x0001;
    hf[4] = 0xfc00;
    let scalar = dispatch(Isa::Scalar, Lanes(&values, &bf, &hf));
    assert_eq!(scalar.1, values.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    assert_eq!(scalar.2, [0, 1].map(|half| bf.map(|pair| bf16::from_bits(pair[half]).to_f32())));
    assert_eq!(scalar.3, hf.map(|b| f16::from_bits(b).to_f32()));
    for isa in Isa::available() {
        assert_eq!(dispatch(isa, Lanes(&values, &bf, &hf)), scalar, "{isa:?}");
    }
}

/// Pairs times one pair, added to numbers, and the numbers rounded.
struct Pairs<'a>(&'a [f32; 16], &'a [[bf16; 2]; 16], [bf16; 2]);

impl Kernel for Pairs<'_> {
    type Output = ([f32; 16], [bf16; 16]);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let (mut dots, mut rounded) = ([0.0; 16], [bf16::ZERO; 16]);
        let [first, second] = self.2.map(|half| u32::from(half.to_bits()));
        let factor = s.splat(f32::from_bits(first | second << 16));
        // SAFETY: every array has sixteen elements.
        unsafe {
            s.write(&mut dots, s.dot_pairs(s.read(self.0), s.load(self.1.as_ptr().cast()), factor));
            s.store_bf16(rounded.as_mut_ptr(), s.read(self.0));
        }
        (dots, rounded)
    }
}

#[test]
fn pairs_are_multiplied_and_rounded_alike() {
    // The values have few bits, so the order of rounding does not matter; the first is half-way
    // between two bf16.
    let mut values: [f32; 16] = std::array::from_fn(|i| i as f32 * 0.375 - 2.0);
    values[0] = 1.0 + 1.0 / 256.0;
    values[1] = 1.0 + 3.0 / 256.0;
    let pairs: [[bf16; 2]; 16] = std::array::from_fn(|i| [i as f32 - 7.5, 3.0 - i as f32].map(bf16::from_f32));
    let factor = [0.5, -1.25].map(bf16::from_f32);
    let dots = std::array::from_fn(|i| values[i] + 0.5 * pairs[i][0].to_f32() - 1.25 * pairs[i][1].to_f32());
    for isa in Isa::available() {
        assert_eq!(dispatch(isa, Pairs(&values, &pairs, factor)), (dots, values.map(bf16::from_f32)), "{isa:?}");
    }
}

struct Bytes<'a>(&'a [u8; 32]);

impl Kernel for Bytes<'_> {
    /// int8, both halves of e4m3, low and high nibbles.
    type Output = [[f32; 16]; 5];

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let mut lanes = [[0.0; 16]; 5];
        // SAFETY: the array has 32 bytes.
        unsafe {
            let [low, high] = s.load_nibbles(self.0.as_ptr());
            let [first, second] = s.load_e4m3(self.0.as_ptr());
            let vectors = [s.load_i8(self.0.as_ptr().cast()), first, second, low, high];
            lanes.iter_mut().zip(vectors).for_each(|(lanes, vector)| s.write(lanes, vector));
        }
        lanes
    }
}

#[test]
fn every_code_of_a_byte_is_widened_exactly() {
    let e4m3 = |code: u8| {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
        let size = if exponent == 0 { mantissa / 512.0 } else { (8.0 + mantissa) * 2f32.powi(exponent - 10) };
        (if code > 127 { -size } else { size }) / 256.0
    };
    for first in (0..=255u8).step_by(16) {
        let codes: [u8; 32] = std::array::from_fn(|i| first.wrapping_add(i as u8));
        let expected: [[f32; 16]; 5] = [
            std::array::from_fn(|i| f32::from(codes[i] as i8)),
            std::array::from_fn(|i| e4m3(codes[i])),
            std::array::from_fn(|i| e4m3(codes[16 + i])),
            std::array::from_fn(|i| f32::from(codes[i] & 15)),
            std::array::from_fn(|i| f32::from(codes[i] >> 4)),
        ];
        for isa in Isa::available() {
            assert_eq!(dispatch(isa, Bytes(&codes)), expected, "{isa:?} from {first}");
        }
    }
}

#[test]
fn bf16_is_rounded_as_half_does() {
    // The steps reach both ends of the range, infinities and NaN.
    for value in (0..=u32::MAX).step_by(0x7fff).map(f32::from_bits) {
        assert_eq!(nearest_bf16(value), half::bf16::from_f32(value).to_f32().to_bits(), "{value}");
    }
}
