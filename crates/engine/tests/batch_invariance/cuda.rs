//! The same on a CUDA device in batch-invariant mode: alone, among 128, in chunks, from the prefix
//! cache, after preemption, through the host tier. Skipped without a device.

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use folio_device::{
    KvFormat, Steps,
    cuda::{Cuda, CudaConfig, Precision, driver},
};
use folio_model::OpenModel;

use crate::{
    Probes, check_ways,
    harness::{Bench, Room},
    holes, take_turn,
    tiny::{self, Size},
};

const ROOM: Room = Room { seqs: 128, max_len: 512, blocks: 768 };
/// Heads of 64 and widths of 128 and more, for which there are fast kernels.
const WIDE: Size = Size { hidden: 256, heads: 8, kv_heads: 2, head_dim: 64, inter: 128, experts: 32, hole: None };
/// Longer than a split of keys, and than two if the context allows.
const LONG: Probes = Probes { lengths: &[1, 16, 33, 70, 300, 470], num_tokens: 24 };

pub fn is_there() -> bool {
    match driver::device_count() {
        Ok(count) if count > 0 => return true,
        Ok(_) => folio_testing::skip!(Gpu, "this machine has no CUDA device"),
        Err(error) => folio_testing::skip!(Gpu, "{error}"),
    }
    false
}

/// Folder for kernels that are compiled at run time.
pub fn cache_folder() -> Option<PathBuf> {
    Some(std::env::temp_dir().join("folio-kernels-of-tests"))
}

/// All decoders on one device.
fn open(config: CudaConfig) -> Cuda {
    static DEVICE: OnceLock<Arc<driver::Device>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| {
        let config = driver::CudaConfig { ordinal: 0, cache_folder: cache_folder() };
        Arc::new(driver::Device::open(&config).unwrap_or_else(|error| panic!("{error}")))
    });
    Cuda::on(Arc::clone(device), config).unwrap_or_else(|error| panic!("{error}"))
}

/// In bf16 as requested, and in f32, which is invariant too.
fn check(name: &str, model: &OpenModel) {
    let _turn = take_turn();
    let invariant = CudaConfig { batch_invariant: true, ..CudaConfig::default() };
    let f32 = CudaConfig { activations: Precision::F32, ..CudaConfig::default() };
    let fp8 = (invariant.clone(), KvFormat::Fp8);
    for (config, kv_format) in [(invariant, KvFormat::BF16), fp8, (f32, KvFormat::F32)] {
        let device = open(config);
        let name = format!("{name}, {}, keys in {}", device.numerics(), kv_format.name());
        let bench = Bench::on(device, model, kv_format, ROOM);
        check_ways(&name, &bench, &LONG, &LONG.alone(&bench));
        println!("{name}: the same bits in every way");
    }
}

#[test]
fn tiny_model_on_cuda() {
    if is_there() {
        check("tiny alternating", &tiny::alternating());
    }
}

#[test]
fn experts_on_cuda() {
    if is_there() {
        check("tiny experts", &tiny::experts());
        check("wide experts", &tiny::experts_of(&WIDE));
    }
}

#[test]
fn default_model_on_cuda() {
    if is_there() {
        let built = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
        // Set on a machine that has the tests without their tree.
        let named = std::env::var_os("FOLIO_TREE").map_or_else(|| PathBuf::from("."), PathBuf::from);
        let tree = if built.is_dir() { built } else { named };
        let path = tree.join("models/folio-rust-42m.gguf");
        let model = folio_model::open(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        check("folio-rust-42m", &model);
    }
}

#[test]
fn rows_that_are_no_numbers_on_cuda() {
    if is_there() {
        let _turn = take_turn();
        for size in [tiny::SMALL, WIDE] {
            let model = tiny::experts_of(&Size { hole: Some(holes::HOLE), ..size });
            for (batch_invariant, kv_format) in [(true, KvFormat::BF16), (true, KvFormat::Fp8), (true, KvFormat::Int8)]
            {
                let device = open(CudaConfig { batch_invariant, ..CudaConfig::default() });
                let name = format!("{} experts, {}, keys in {}", size.experts, device.numerics(), kv_format.name());
                holes::check(&name, &Bench::on(device, &model, kv_format, ROOM));
                println!("{name}: nobody else noticed");
            }
        }
    }
}
