//! A device that is lost to a kernel with an invalid address: requests end with the reason, the
//! engine ends visibly, and the process lives. Skipped without a device.

use std::{
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use folio_device::{
    KvFormat,
    cuda::{
        Cuda, CudaConfig,
        driver::{Device, Launch, args},
    },
};
use folio_engine::{
    Background, Engine, EngineConfig, Error, Event, FinishReason, Rebuild, Runner, SamplingParams, StepRunner,
};
use folio_model::{Decoder, DecoderLimits, OpenModel};

use crate::{
    TINY, cuda,
    harness::{Bench, submit},
    tiny,
};

/// Set when the test runs itself again, because a lost device is lost to its whole process.
const IN_NEW_PROCESS: &str = "FOLIO_TEST_IN_NEW_PROCESS";

#[test]
fn a_lost_device_ends_the_engine_and_not_the_process() {
    if !cuda::is_there() {
        return;
    }
    if std::env::var_os(IN_NEW_PROCESS).is_some() {
        return lose();
    }
    let mut process = Command::new(std::env::current_exe().expect("this program"));
    let name = "lost::a_lost_device_ends_the_engine_and_not_the_process";
    let status = process.args(["--exact", name, "--nocapture"]).env(IN_NEW_PROCESS, "1").status();
    assert!(status.expect("it starts").success());
}

fn runner(backend: Cuda, model: &OpenModel) -> Result<impl StepRunner + use<>, Error> {
    let groups = model.spec.kv_groups().len();
    let limits = DecoderLimits {
        rows: 64,
        spans: 4,
        outputs: 4,
        table_entries: 128,
        blocks: vec![128; groups],
        kv_format: KvFormat::BF16,
    };
    Ok(Runner::new(Decoder::load(backend, model, limits, &mut |_| {})?, None))
}

fn lose() {
    let model = tiny::alternating();
    let open = || Cuda::new(CudaConfig { cache_folder: cuda::cache_folder(), ..CudaConfig::default() });
    let backend = open().expect("a device");
    let device: Arc<Device> = Arc::clone(backend.device());
    let rebuild = Rebuild::new(move || {
        let backend = open().map_err(|error| Error::Step(error.to_string()))?;
        Ok(Box::new(Background::start(runner(backend, &tiny::alternating())?)?))
    });
    let config = EngineConfig {
        max_seqs: 4,
        budget_tokens: 64,
        max_model_len: 512,
        groups: Bench::new(&model, 1).groups(128),
        logits_width: model.spec.vocab_size,
        rebuild: Some(rebuild),
        warn: Some(|line| println!("{line}")),
        ..EngineConfig::default()
    };
    let executor = Background::start(runner(backend, &model).expect("the model loads")).expect("a thread");
    let engine = Engine::start(Box::new(executor), config).expect("a sound configuration");
    let params = SamplingParams { max_tokens: 480, temperature: 0.0, ignore_eos: true, ..SamplingParams::default() };
    let mut streams: Vec<_> = (1..4).map(|token| submit(&engine, vec![token; 8], params.clone())).collect();
    for stream in &mut streams {
        assert!(matches!(stream.recv(), Some(Event::Token { .. })), "it answers");
    }
    let once = Launch { grid: [1, 1, 1], threads: 1, shared_bytes: 0, overlap: false };
    device.launch(&device.kernel("probe_fault"), once, args![0x10_u64]);
    drop(device);
    for mut stream in streams {
        let last = std::iter::from_fn(|| stream.recv()).last();
        let Some(Event::Finished { reason: FinishReason::Error(why), .. }) = last else {
            panic!("a request on a lost device ended with {last:?}");
        };
        assert!(why.contains("the GPU was lost"), "{why}");
    }
    let start = Instant::now();
    while engine.is_running() {
        assert!(start.elapsed() < Duration::from_secs(20), "an engine without a device goes on");
        std::thread::sleep(Duration::from_millis(5));
    }
    let request = engine.request(vec![1; 8], params).expect("valid");
    assert!(engine.submit(request).is_err(), "an engine that has ended takes a request");
    engine.shutdown();
    let bench = Bench::new(&model, 1);
    assert_eq!(TINY.alone(&bench).len(), TINY.lengths.len(), "the process computes on");
    println!("the device was lost, the engine ended, the process lives");
}
