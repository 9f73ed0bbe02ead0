//! A step of no rows: every operation leaves everything unchanged.

use folio_device::{
    Activation, Attention, Backend, Batch, ExpertsSource, GroupTables, InputLimits, KvFormat, KvShape, Norm, NormSpan,
    PrepareQkv, Product, RouterScore, Routing, TensorKind,
};

use crate::data::{download, f32_matrix, tensor};

const WIDTH: usize = 4;

pub fn run<B: Backend>(backend: &mut B) {
    let limits = InputLimits { rows: 2, spans: 1, outputs: 1, table_entries: 1, groups: 1, ropes: 1, rope_pairs: 1 };
    let mut inputs = backend.inputs(limits).unwrap();
    let batch = Batch { groups: vec![GroupTables::default()], ..Batch::default() };
    let shape = KvShape { layers: 1, blocks: 1, kv_heads: 1, head_dim: 2, format: KvFormat::F32 };
    let mut kv = backend.kv(shape).unwrap();
    let weight = backend.weight(&f32_matrix(WIDTH, &[1.0; WIDTH * WIDTH])).unwrap();
    let source = ExpertsSource {
        gate_up: vec![f32_matrix(WIDTH, &[1.0; 2 * WIDTH])],
        down: vec![f32_matrix(1, &[1.0; WIDTH])],
        gate_up_bias: None,
        down_bias: None,
    };
    let experts = backend.experts(source).unwrap();
    let (norm, frequency) = (backend.vector(&[1.0; WIDTH]).unwrap(), backend.vector(&[1.0]).unwrap());
    let mut seven = |width: usize, kind| tensor(backend, width, &vec![7.0; 2 * width], kind);
    let [mut out, x, wide, mut qkv] = [1, 1, 2, 2].map(|times| seven(times * WIDTH, TensorKind::Activation));
    let [mut residual, mut picked] = [WIDTH; 2].map(|width| seven(width, TensorKind::Stream));
    let [one, mut logits] = [1, WIDTH].map(|width| seven(width, TensorKind::Scores));

    backend.upload(&mut inputs, &batch);
    backend.rope_angles(&mut inputs, 0, &frequency, 1.0);
    backend.embed(&mut residual, &weight, &inputs, 1.0);
    backend.rms_norm(&mut out, &x, &norm, 1e-6, 0);
    backend.add(&mut residual, &x, 1.0, 0);
    backend.add_rms_norm(&mut out, &mut residual, &x, 1.0, &norm, 1e-6, 0);
    backend.linear(&mut out, &x, &weight, Some(&norm), 0);
    let product = || Product { weight: &weight, bias: Some(&norm) };
    backend.norm_linear(&mut out, &mut picked, &residual, Norm { weight: &norm, eps: 1e-6 }, product(), 0);
    backend.linear_add(&mut residual, &mut out, &x, product(), 1.0, 0);
    let prepare = PrepareQkv {
        heads: 2,
        kv_heads: 1,
        head_dim: 2,
        group: 0,
        rope: Some(0),
        q_norm: None,
        k_norm: None,
        norm_span: NormSpan::Head,
        eps: 1e-6,
    };
    backend.prepare_qkv(&mut qkv, &mut kv, 0, prepare, &inputs);
    let attention = Attention {
        heads: 2,
        kv_heads: 1,
        head_dim: 2,
        group: 0,
        scale: 1.0,
        window: None,
        soft_cap: None,
        sinks: None,
    };
    backend.attention(&mut out, &qkv, &kv, 0, attention, &inputs);
    backend.gate(&mut out, &wide, Activation::Silu, 0);
    let routing = Routing {
        score: RouterScore::Softmax,
        top_k: 1,
        normalize: true,
        scale: 1.0,
        choice_bias: None,
        groups: 1,
        groups_kept: 1,
        activation: Activation::Silu,
    };
    backend.experts_forward(&mut out, &x, &one, &experts, routing, 0);
    backend.add_gated(&mut out, &x, &one, 0);
    backend.gather_outputs(&mut picked, &residual, &inputs);
    backend.finish_logits(&mut logits, 2.0, Some(3.0), 0);
    backend.copy_blocks(&mut kv, &[]);
    backend.move_tokens(&mut kv, &[]);

    assert!(download(backend, &out, 0).is_empty());
    for tensor in [&out, &residual, &x, &picked, &logits] {
        assert_eq!(download(backend, tensor, 2), [7.0; 2 * WIDTH]);
    }
    assert_eq!(download(backend, &qkv, 2), [7.0; 4 * WIDTH]);
}
