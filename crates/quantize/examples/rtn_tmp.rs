use folio_formats::{Safetensors, WeightSource};
use folio_quantize::write::*;
use folio_quantize::*;
use std::borrow::Cow;
use std::path::Path;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let (source, out) = (Path::new(&args[1]), Path::new(&args[2]));
    if let Ok(mix) = args[3].parse::<Mix>() {
        let job =
            GgufJob { source, out, mix, keep: &std::env::var("KEEP").ok().into_iter().collect::<Vec<_>>(), threads: 2 };
        println!("{:?}", write_gguf(&job, &mut |_| {}).unwrap());
        return;
    }
    let mut options = Options::new(args[3].parse().unwrap(), Method::Rtn);
    if args.len() > 4 {
        if let Target::Int { bits, group, .. } = options.target {
            options.target = Target::Int { bits, group, zero_points: true }
        }
    }
    let mut writer = FolderWriter::create(source, out, &options, true).unwrap();
    let weights = Safetensors::open(source).unwrap();
    for name in weights.names() {
        let view = weights.require(name).unwrap();
        let linear = view.shape.len() == 2 && name.contains("_proj.weight");
        if linear {
            let cols = view.shape[1];
            let q = if options.target == Target::LlmInt8 {
                rtn::quantize_around(options.target, view.to_f32().unwrap(), cols, vec![3, 70], 2)
            } else {
                rtn::quantize(options.target, &view.to_f32().unwrap(), cols, 2)
            };
            writer.tensor(name, Finished::Quantized(&q)).unwrap();
        } else {
            let plain = Plain { format: view.format, shape: view.shape.clone(), bytes: Cow::Borrowed(view.bytes) };
            writer.tensor(name, Finished::Plain(plain)).unwrap();
        }
    }
    println!("{:?}", writer.finish().unwrap());
}
