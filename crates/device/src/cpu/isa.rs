//! The instruction set of the kernels: found once at start, overridable by config.

/// An instruction set with its own kernels. Results of one `Isa` are bit-equal on every machine
/// that has it; two `Isa`s agree within rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust: it runs anywhere, and tests compare the others with it.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and DQ, with BF16, VNNI and VBMI.
    Avx512,
    /// The AVX-512 set, with AMX for products of bf16.
    Amx,
    /// NEON, which every aarch64 has.
    Neon,
}

impl Isa {
    /// The sets that this machine can run, slowest first.
    pub fn available() -> Vec<Isa> {
        let mut found = vec![Isa::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            if has_avx2() {
                found.push(Isa::Avx2);
                if has_avx512() {
                    found.push(Isa::Avx512);
                    if has_amx() {
                        found.push(Isa::Amx);
                    }
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        found.push(Isa::Neon);
        found
    }

    /// The fastest of [`Isa::available`].
    pub fn best() -> Isa {
        Isa::available().last().copied().unwrap_or(Isa::Scalar)
    }

    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
            Isa::Neon => "neon",
        }
    }

    /// The inverse of [`Isa::name`].
    pub fn from_name(name: &str) -> Option<Isa> {
        [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Amx, Isa::Neon].into_iter().find(|isa| isa.name() == name)
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512bf16")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx512vbmi")
}

/// Whether the machine has tile registers, and the system lets this process use them: a process has
/// to ask, and its threads may then use them as well.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn has_amx() -> bool {
    /// Request code for a part of a thread's state, and the part that holds tiles.
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    /// Bits of BF16 and tiles in CPUID leaf 7.
    const FEATURES: u32 = 1 << 22 | 1 << 24;
    let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
    // SAFETY: a system call that takes two numbers and touches no memory of ours.
    let allowed = || unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0;
    features & FEATURES == FEATURES && allowed()
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn has_amx() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_scalar_is_always_there() {
        assert_eq!(Isa::available()[0], Isa::Scalar);
        for isa in Isa::available() {
            assert_eq!(Isa::from_name(isa.name()), Some(isa));
        }
        assert_eq!(Isa::from_name("mmx"), None);
    }
}
