//! The driver layer on a real GPU. Without a GPU these tests are skipped.
//!
//! One test function runs all cases in order: the last of them breaks the device on purpose.

use folio_device::Error;
use folio_device::cuda::driver::{
    Collective, CudaConfig, CudaError, Device, Element, Launch, Matrix2d, Number, Staging, Stream, Swizzle, UniqueId,
    args, device_count,
};

fn launch_1d(count: usize, overlap: bool) -> Launch {
    Launch { grid: [(count as u32).div_ceil(256), 1, 1], threads: 256, shared_bytes: 0, overlap }
}

#[test]
fn a_device_that_is_not_there_is_told() {
    match device_count() {
        Err(error) => {
            println!("no driver: {error}");
            assert!(matches!(error, Error::Cuda(_)), "{error}");
            let text = Device::open(&CudaConfig::default()).map(|_| ()).unwrap_err().to_string();
            assert!(text.contains("CUDA"), "{text}");
        }
        Ok(count) => {
            let config = CudaConfig { ordinal: count, cache_folder: None };
            let text = Device::open(&config).map(|_| ()).unwrap_err().to_string();
            println!("no such device: {text}");
            assert!(text.contains(&format!("no CUDA device {count}")), "{text}");
        }
    }
}

/// Set if the test runs itself again, after its process has lost the device.
const IN_NEW_PROCESS: &str = "FOLIO_TEST_IN_NEW_PROCESS";

#[test]
fn the_driver_layer_on_a_device() {
    match device_count() {
        Ok(1..) => {}
        Ok(_) => return folio_testing::skip!(Gpu, "this machine has no CUDA device"),
        Err(error) => return folio_testing::skip!(Gpu, "{error}"),
    }
    let start = std::time::Instant::now();
    let device = Device::open(&CudaConfig::default()).unwrap();
    if std::env::var_os(IN_NEW_PROCESS).is_some() {
        assert_eq!(scale(&device, 100, true)[7], 17.0);
        return;
    }
    println!("opened in {:?}: {:?}", start.elapsed(), device.info());
    println!("kernels {}, {} bytes free", device.kernel_origin(), device.free_bytes().unwrap());
    copies(&device);
    large_copies(&device);
    launches(&device);
    other_threads(&device);
    graphs(&device);
    broken_recordings(&device);
    shared_memory(&device);
    events(&device);
    profiles(&device);
    staging(&device);
    memory_runs_out(&device);
    tensor_maps(&device);
    translated(&device);
    compiled_here(&device);
    one_rank(&device);
    drop(device);
    a_device_is_lost();
}

fn copies(device: &Device) {
    for count in [0, 1, 255, 4096, 1_000_003] {
        let values: Vec<f32> = (0..count).map(|i| i as f32 * 0.5).collect();
        let buffer = device.alloc_from("values", &values).unwrap();
        let twin = device.alloc_zeroed("a copy", buffer.bytes()).unwrap();
        let mut out = vec![1.0_f32; count];
        device.download(&twin, 0, &mut out).unwrap();
        assert!(out.iter().all(|&x| x == 0.0));
        device.copy(&twin, 0, &buffer, 0, buffer.bytes());
        device.download(&twin, 0, &mut out).unwrap();
        assert_eq!(out, values);
        let mut pinned = device.pinned("staging", buffer.bytes()).unwrap();
        device.download_async(Stream::Copy, &buffer, 0, &mut pinned, 0..count * 4);
        device.synchronize(Stream::Copy).unwrap();
        assert_eq!(pinned.as_slice::<f32>(0..count * 4), values);
        pinned.as_mut_slice::<f32>(0..count * 4).iter_mut().for_each(|x| *x += 1.0);
        device.upload_async(Stream::Compute, &twin, 0, &pinned, 0..count * 4);
        device.download(&twin, 0, &mut out).unwrap();
        assert!(out.iter().zip(&values).all(|(found, before)| *found == before + 1.0));
    }
    println!("copies: right");
}

fn large_copies(device: &Device) {
    let bytes = 256 << 20;
    let values = vec![7_u8; bytes];
    let buffer = device.alloc("values", bytes).unwrap();
    let pinned = device.pinned("staging", bytes).unwrap();
    for round in 0..2 {
        let start = std::time::Instant::now();
        device.upload(&buffer, 0, &values).unwrap();
        let pageable = start.elapsed().as_secs_f64();
        let start = std::time::Instant::now();
        device.upload_async(Stream::Copy, &buffer, 0, &pinned, 0..bytes);
        device.synchronize(Stream::Copy).unwrap();
        let direct = start.elapsed().as_secs_f64();
        println!(
            "256 MiB to the device, round {round}: {:.1} GB/s pageable, {:.1} GB/s pinned",
            bytes as f64 / pageable / 1e9,
            bytes as f64 / direct / 1e9
        );
    }
}

fn scale(device: &Device, count: usize, overlap: bool) -> Vec<f32> {
    let values: Vec<f32> = (0..count).map(|i| i as f32).collect();
    let input = device.alloc_from("input", &values).unwrap();
    let output = device.alloc_zeroed("output", input.bytes()).unwrap();
    let kernel = device.kernel("probe_scale");
    // A chain: each launch reads the previous one's output.
    for round in 0..10 {
        let (to, from) = if round % 2 == 0 { (&output, &input) } else { (&input, &output) };
        device.launch(&kernel, launch_1d(count, overlap), args![to.ptr(), from.ptr(), 1.0_f32, 1.0_f32, count as i32]);
    }
    let mut out = vec![0.0; count];
    device.download(&input, 0, &mut out).unwrap();
    out
}

fn launches(device: &Device) {
    for overlap in [false, true] {
        for count in [1, 256, 100_000] {
            let out = scale(device, count, overlap);
            assert!(out.iter().enumerate().all(|(i, &x)| x == i as f32 + 10.0), "overlap {overlap}, {count}");
        }
    }
    let none = Launch { grid: [0, 1, 1], threads: 32, shared_bytes: 0, overlap: false };
    device.launch(&device.kernel("probe_scale"), none, args![0_u64, 0_u64, 1.0_f32, 0.0_f32, 0_i32]);
    device.synchronize(Stream::Compute).unwrap();
    assert!(device.find_kernel("no_such_kernel").is_none());
    let wrong = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        device.launch(&device.kernel("probe_scale"), none, args![0_u64, 0_u64, 1.0_f32, 0.0_f32, 0_i64]);
    }));
    println!("an argument of a wrong size panics: {}", wrong.is_err());
    assert!(wrong.is_err() || device.info().driver_version < 12_040);
    // Measures the host's time for a launch.
    let buffer = device.alloc_zeroed("a number", 4).unwrap();
    let kernel = device.kernel("probe_scale");
    for overlap in [false, true] {
        let start = std::time::Instant::now();
        for _ in 0..1000 {
            device.launch(&kernel, launch_1d(1, overlap), args![buffer.ptr(), buffer.ptr(), 1.0_f32, 1.0_f32, 1_i32]);
        }
        let host = start.elapsed();
        device.synchronize(Stream::Compute).unwrap();
        println!(
            "1000 launches, overlap {overlap}: {:.2} us each on the host, {:.2} us each in all",
            host.as_secs_f64() * 1e3,
            start.elapsed().as_secs_f64() * 1e3
        );
    }
}

fn other_threads(device: &Device) {
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                let values = vec![thread as f32; 1000];
                let buffer = device.alloc_from("values of a thread", &values).unwrap();
                let mut out = vec![0.0_f32; 1000];
                device.download(&buffer, 0, &mut out).unwrap();
                assert_eq!(out, values);
            });
        }
    });
    println!("other threads: right");
}

fn graphs(device: &Device) {
    let count = 10_000;
    let values: Vec<f32> = (0..count).map(|i| i as f32).collect();
    let kernel = device.kernel("probe_scale");
    for overlap in [false, true] {
        let buffer = device.alloc_from("values", &values).unwrap();
        let twin = device.alloc_zeroed("a twin", buffer.bytes()).unwrap();
        let step = || {
            for _ in 0..5 {
                let launch = launch_1d(count, overlap);
                let shape = count as i32;
                device.launch(&kernel, launch, args![twin.ptr(), buffer.ptr(), 0.5_f32, 3.0_f32, shape]);
                device.launch(&kernel, launch, args![buffer.ptr(), twin.ptr(), 1.5_f32, 1.0_f32, shape]);
            }
        };
        let mut eager = vec![0.0_f32; count];
        step();
        step();
        device.download(&buffer, 0, &mut eager).unwrap();
        device.upload(&buffer, 0, &values).unwrap();
        let graph = device.capture(step).unwrap();
        let mut out = vec![0.0_f32; count];
        device.download(&buffer, 0, &mut out).unwrap();
        assert_eq!(out, values, "a recording ran");
        device.launch_graph(&graph);
        device.launch_graph(&graph);
        device.download(&buffer, 0, &mut out).unwrap();
        assert_eq!(out, eager);
        let start = std::time::Instant::now();
        for _ in 0..100 {
            device.launch_graph(&graph);
        }
        let host = start.elapsed();
        device.synchronize(Stream::Compute).unwrap();
        println!(
            "a graph of {} operations = eager, overlap {overlap}: {:.1} us on the host, {:.1} us in all",
            graph.nodes(),
            host.as_secs_f64() * 1e4,
            start.elapsed().as_secs_f64() * 1e4
        );
    }
}

fn broken_recordings(device: &Device) {
    let kernel = device.kernel("probe_scale");
    let too_many = Launch { grid: [1, 1, 1], threads: 4096, shared_bytes: 0, overlap: false };
    let error = device.capture(|| device.launch(&kernel, too_many, args![0_u64, 0_u64, 1.0_f32, 0.0_f32, 0_i32]));
    println!("a launch that cannot be, recorded: {}", error.map(|_| ()).unwrap_err());
    // Waiting is not allowed during a recording; it spoils the recording, not the stream.
    let error = device.capture(|| _ = device.synchronize(Stream::Compute));
    println!("waiting while recording: {}", error.map(|_| ()).unwrap_err());
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| device.capture(|| panic!("on purpose"))));
    assert!(panicked.is_err());
    device.check().unwrap();
    assert_eq!(scale(device, 100, true)[7], 17.0);
    println!("after broken recordings the stream works");
}

fn shared_memory(device: &Device) {
    let kernel = device.kernel("probe_shared");
    for kib in [4_u32, 48, 96] {
        let count = (kib << 8) as usize;
        let values = device.alloc_from("values", &vec![1.0_f32; count]).unwrap();
        let sum = device.alloc_zeroed("a sum", 4).unwrap();
        let launch = Launch { grid: [1, 1, 1], threads: 128, shared_bytes: kib << 10, overlap: true };
        device.launch(&kernel, launch, args![sum.ptr(), values.ptr(), count as i32]);
        let mut out = [0.0_f32];
        device.download(&sum, 0, &mut out).unwrap();
        assert_eq!(out[0], count as f32);
    }
    println!("shared memory: right, {} blocks of 96 KiB fit", kernel.blocks_per_multiprocessor(device, 128, 96 << 10));
}

fn events(device: &Device) {
    let (first, second) = (device.timing_event().unwrap(), device.timing_event().unwrap());
    let buffer = device.alloc("a large buffer", 1 << 30).unwrap();
    device.fill(&buffer, 0, 1 << 30, 0);
    device.record(&first, Stream::Compute);
    device.fill(&buffer, 0, 1 << 30, 1);
    device.record(&second, Stream::Compute);
    device.wait(Stream::Copy, &second);
    let mut pinned = device.pinned("a byte", 1).unwrap();
    device.download_async(Stream::Copy, &buffer, (1 << 30) - 1, &mut pinned, 0..1);
    device.synchronize(Stream::Copy).unwrap();
    assert_eq!(pinned.as_slice::<u8>(0..1), [1]);
    second.synchronize().unwrap();
    assert!(second.is_done());
    let milliseconds = first.elapsed_ms(&second).unwrap();
    println!("filling 1 GiB: {milliseconds:.3} ms, {:.2} TB/s", (1_u64 << 30) as f32 / milliseconds / 1e9);
}

fn profiles(device: &Device) {
    device.start_profile();
    scale(device, 1000, true);
    device.profiled("waiting", || device.synchronize(Stream::Compute).unwrap());
    let times = device.end_profile().unwrap();
    println!("profile: {times:?}");
    assert_eq!(times.iter().map(|time| time.calls).sum::<u64>(), 11);
    scale(device, 10, true);
    assert_eq!(device.end_profile().unwrap(), []);
}

/// More bytes than the halves hold, so that each is used several times.
fn staging(device: &Device) {
    let bytes = (512 << 20) + 12_345;
    let values: Vec<u8> = (0..bytes).map(|i| (i % 253) as u8).collect();
    let buffer = device.alloc_zeroed("values", bytes + 7).unwrap();
    let mut staging = Staging::new(device, 32 << 20).unwrap();
    for round in 0..2 {
        let start = std::time::Instant::now();
        staging.upload(device, &buffer, 7, &values).unwrap();
        staging.finish(device);
        device.synchronize(Stream::Compute).unwrap();
        println!("staging, round {round}: {:.1} GB/s", bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    let mut out = vec![0; bytes];
    device.download(&buffer, 7, &mut out).unwrap();
    assert!(out == values);
    staging.upload_with(device, &buffer, 0, 1000, |start, part| part.fill(start as u8 + 3)).unwrap();
    staging.finish(device);
    device.download(&buffer, 0, &mut out[..1000]).unwrap();
    assert!(out[..1000].iter().all(|&x| x == 3));
}

fn memory_runs_out(device: &Device) {
    let error = device.alloc("the weights", 1 << 44).map(|_| ()).unwrap_err();
    println!("{error}");
    assert!(
        matches!(&error, Error::Cuda(CudaError::OutOfMemory { what, bytes, free })
            if what == "the weights" && *bytes == 1 << 44 && *free > 0),
        "{error:?}"
    );
    device.check().unwrap();
}

fn tensor_maps(device: &Device) {
    if !device.info().is_hopper_or_later() {
        return folio_testing::skip!(Gpu, "tensor maps need Hopper or later");
    }
    let buffer = device.alloc("a matrix", 4096 * 1024 * 2).unwrap();
    let matrix = Matrix2d {
        ptr: buffer.ptr(),
        rows: 4096,
        cols: 1024,
        stride_bytes: 2048,
        box_rows: 128,
        box_cols: 64,
        element: Element::Bf16,
        swizzle: Swizzle::Bytes128,
    };
    device.tensor_map_2d(&matrix).unwrap();
    let error = device.tensor_map_2d(&Matrix2d { box_rows: 1000, ..matrix }).unwrap_err();
    println!("tensor maps: made; {error}");
}

/// The same kernels from PTX, as on a device of a later generation.
fn translated(device: &Device) {
    if device.info().capability < (9, 0) {
        return folio_testing::skip!(Gpu, "the PTX is for Hopper or later");
    }
    let start = std::time::Instant::now();
    let translated = Device::open_translated(&CudaConfig::default()).unwrap();
    println!("opened in {:?}, kernels {}", start.elapsed(), translated.kernel_origin());
    assert_eq!(scale(&translated, 1000, true), scale(device, 1000, true));
}

/// The same kernels, compiled on this machine if it has a compiler; the second time from the cache.
fn compiled_here(device: &Device) {
    let folder = std::env::temp_dir().join(format!("folio-cuda-driver-{}", std::process::id()));
    let config = CudaConfig { ordinal: 0, cache_folder: Some(folder.clone()) };
    for _ in 0..2 {
        let start = std::time::Instant::now();
        match Device::open_compiled(&config) {
            Ok(compiled) => {
                println!("opened in {:?}, kernels {}", start.elapsed(), compiled.kernel_origin());
                assert_eq!(scale(&compiled, 1000, true), scale(device, 1000, true));
            }
            Err(error @ Error::Cuda(CudaError::NoLibrary { .. })) => folio_testing::skip!(Gpu, "compiling: {error}"),
            Err(error) => panic!("{error}"),
        }
    }
    let _ = std::fs::remove_dir_all(folder);
    device.check().unwrap();
}

fn one_rank(device: &Device) {
    let id = match UniqueId::new() {
        Ok(id) => id,
        Err(error) => return folio_testing::skip!(Gpu, "NCCL: {error}"),
    };
    let collective = Collective::join(device, &id, 1, 0).unwrap();
    let values: Vec<f32> = (0..5000).map(|i| i as f32).collect();
    let buffer = device.alloc_from("values", &values).unwrap();
    let out = device.alloc_zeroed("gathered", buffer.bytes()).unwrap();
    collective.all_reduce(&buffer, 0, 5000, Number::F32);
    collective.all_gather(&out, 0, &buffer, 0, 5000, Number::F32);
    let mut found = vec![0.0_f32; 5000];
    device.download(&out, 0, &mut found).unwrap();
    assert_eq!(found, values);
    device.fill(&out, 0, out.bytes(), 0);
    collective.group(|collective| {
        collective.send(&buffer, 0, 5000, Number::F32, 0);
        collective.receive(&out, 0, 5000, Number::F32, 0);
    });
    device.download(&out, 0, &mut found).unwrap();
    assert_eq!(found, values);
    device.fill(&out, 0, out.bytes(), 0);
    let graph = device.capture(|| {
        collective.reduce_scatter(&out, 0, &buffer, 0, 2500, Number::F32);
        collective.all_reduce(&out, 0, 2500, Number::F32);
    });
    device.launch_graph(&graph.unwrap());
    device.download(&out, 0, &mut found).unwrap();
    assert_eq!(found[..2500], values[..2500]);
    println!("NCCL with one rank: right, also in a graph");
}

/// A kernel that writes to an unmapped address: an error, no panic, and this process cannot use the
/// device any more. A new process can.
fn a_device_is_lost() {
    let device = Device::open(&CudaConfig::default()).unwrap();
    let buffer = device.alloc_zeroed("some memory", 1 << 20).unwrap();
    let once = Launch { grid: [1, 1, 1], threads: 1, shared_bytes: 0, overlap: false };
    device.launch(&device.kernel("probe_fault"), once, args![0x10_u64]);
    let error = device.synchronize(Stream::Compute).unwrap_err();
    println!("{error}");
    let lost = |error: &Error| matches!(error, Error::Cuda(error) if error.is_lost());
    assert!(lost(&error), "{error:?}");
    // A step that continues does nothing, and the first error stays.
    device.launch(&device.kernel("probe_fault"), once, args![buffer.ptr()]);
    device.fill(&buffer, 0, 1 << 20, 1);
    assert!(device.capture(|| ()).is_err());
    assert_eq!(device.check().unwrap_err().to_string(), error.to_string());
    assert!(lost(&device.alloc("more memory", 1 << 20).map(|_| ()).unwrap_err()));
    drop(buffer);
    drop(device);
    let again = Device::open(&CudaConfig::default()).map(|_| ()).unwrap_err();
    println!("opened again: {again}");
    assert!(lost(&again), "{again:?}");
    let mut process = std::process::Command::new(std::env::current_exe().unwrap());
    let status = process.args(["--exact", "the_driver_layer_on_a_device"]).env(IN_NEW_PROCESS, "1").status().unwrap();
    assert!(status.success(), "a new process: {status}");
}
