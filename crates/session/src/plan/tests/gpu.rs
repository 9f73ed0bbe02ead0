//! Plans for GPUs that need not be there.

use std::sync::atomic::{AtomicUsize, Ordering};

use folio_device::cuda::driver::DeviceInfo;

use super::*;
use crate::options::Dtype;
use crate::random_model::{self, Shape};
use crate::target::Gpu;

const GIB: u64 = 1 << 30;

/// Hopper with that much memory, a part of it taken by the driver.
fn gpu(total_gib: u64, options: &Options) -> Target {
    let info = DeviceInfo {
        ordinal: 0,
        name: "made up".into(),
        capability: (9, 0),
        multiprocessors: 132,
        total_bytes: total_gib * GIB,
        shared_bytes: 227 << 10,
        l2_bytes: 50 << 20,
        driver_version: 13_000,
    };
    Target::Cuda(Gpu::new(info, total_gib * GIB - GIB / 2, options))
}

fn planned(shape: Shape, total_gib: u64, change: impl FnOnce(&mut Options)) -> Result<Plan> {
    // Tests run at once: each call has a folder of its own.
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("folio-plan-{}-{call}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join("config.json"), random_model::config(shape)).expect("writable");
    let model =
        folio_model::open_without_weights(&folder, &folio_model::Wanted::default()).expect("a sound configuration");
    std::fs::remove_dir_all(&folder).expect("removable");
    let mut assets = Assets::bare("random", model);
    let options = options(change);
    assets.quantize(options.quantize)?;
    Plan::new(&assets, None, &options, &gpu(total_gib, &options))
}

#[test]
fn eight_billion_parameters_on_80_and_141_gib() {
    for (total, seqs_at_full_length) in [(80, 13), (141, 27)] {
        let plan = planned(Shape::EightB, total, |_| ()).expect("it fits");
        let (bytes, budget) = (plan.bytes, ((total * GIB - GIB / 2) as f64 * 0.9) as u64);
        // 8.03 billion values of two bytes.
        assert!((16.0e9..16.2e9).contains(&(bytes.weights as f64)), "{bytes:?}");
        assert!(bytes.activations < 3 * GIB && bytes.working < 2 * GIB, "{bytes:?}");
        assert!(bytes.working > 100 << 20, "a library's workspace, split sums, partial results: {bytes:?}");
        // Keys and values get all the rest.
        assert!(bytes.total() <= budget && bytes.total() + plan.groups[0].block_bytes > budget, "{bytes:?}");
        assert_eq!(plan.kv_format, KvFormat::BF16);
        assert_eq!((plan.max_seqs, plan.budget_tokens, plan.max_model_len), (256, 8192, 32768));
        // 128 KiB a token.
        assert_eq!(plan.groups[0].block_bytes, 16 * (128 << 10));
        let at_once = plan.concurrency.last().expect("a length").1;
        assert!(at_once.abs_diff(seqs_at_full_length) <= 2, "{at_once} of full length");
    }
}

#[test]
fn a_host_tier_takes_none_of_the_devices_memory() {
    let plain = planned(Shape::EightB, 80, |_| ()).expect("it fits");
    let tiered = planned(Shape::EightB, 80, |options| {
        options.memory.host_tier_bytes = Some(64 * GIB);
    })
    .expect("it fits");
    assert_eq!(tiered.bytes.host, 64 * GIB);
    assert_eq!((tiered.bytes.kv, tiered.bytes.total()), (plain.bytes.kv, plain.bytes.total()));
    assert!(tiered.to_text("8b").contains("of the host's memory"));
}

#[test]
fn experts_and_codes_need_room_between_their_kernels() {
    let experts = planned(Shape::Moe30B, 141, |_| ()).expect("it fits");
    // Eight rows a token, in and out of both products.
    let rows = 8192 * 8 * (2 * 2048 + 3 * 768) * 2;
    assert!(experts.bytes.working > rows && experts.bytes.working < 2 * rows, "{:?}", experts.bytes);
    let int8 = |options: &mut Options| options.quantize = Some(AtLoad::Int8);
    let (plain, coded) = (planned(Shape::EightB, 80, |_| ()), planned(Shape::EightB, 80, int8));
    let (plain, coded) = (plain.expect("it fits").bytes, coded.expect("it fits").bytes);
    // The largest matrix of a layer, written out.
    assert!(coded.working >= plain.working + 2 * 28672 * 4096, "{coded:?}");
    assert!(coded.weights < plain.weights * 6 / 10 && coded.kv > plain.kv);
}

#[test]
fn what_does_not_fit_a_gpu_says_so() {
    let error = planned(Shape::EightB, 16, |_| ()).map(|plan| plan.bytes).expect_err("16 GB of weights").to_string();
    assert!(error.contains("the weights take") && error.contains("0.9 of the GPU's memory"), "{error}");
    let small = planned(Shape::EightB, 24, |options| options.max_model_len = Some(2048)).expect("it fits");
    assert!(small.bytes.total() <= 24 * GIB && small.concurrency.last().is_some_and(|last| last.1 >= 8));
    // In f32 everything is twice as large, and nothing is narrowed.
    let wide = planned(Shape::EightB, 80, |options| options.device.dtype = Dtype::Float32).expect("it fits");
    assert_eq!(wide.kv_format, KvFormat::F32);
    assert!((32.0e9..32.4e9).contains(&(wide.bytes.weights as f64)), "{:?}", wide.bytes);
}
