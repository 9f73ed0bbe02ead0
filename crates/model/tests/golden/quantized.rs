//! Models that other tools quantized, in those tools' files, against transformers on the
//! dequantized weights.

use std::{fs, path::PathBuf};

use folio_device::reference::Reference;
use folio_formats::Safetensors;
use folio_model::OpenModel;

use crate::{families::for_all, file, run};

/// Largest difference of logits, whatever their size.
const TOLERANCE: f64 = 1e-4;

fn folder() -> PathBuf {
    file::folder().join("../quantized/models")
}

fn golden(name: &str) -> file::Golden {
    file::Golden { name: name.to_owned(), ..file::read(&format!("../quantized/models/{name}/golden")) }
}

fn check(golden: &file::Golden, model: &OpenModel) -> Result<f64, String> {
    match run::check(golden, model, Reference::new)? {
        near if near <= TOLERANCE => Ok(near),
        far => Err(format!("logits differ by {far:.1e}")),
    }
}

#[test]
fn quantized_models_agree_with_transformers() {
    let entries = fs::read_dir(folder()).expect("a folder").map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<String> = entries.map(|name| name.into_string().expect("a name")).collect();
    names.sort();
    assert!(names.len() >= 5, "{names:?}");
    let goldens: Vec<file::Golden> = names.iter().map(|name| golden(name)).collect();
    for_all(&goldens, |golden| {
        let model = folio_model::open(&folder().join(&golden.name)).map_err(|error| error.to_string())?;
        check(golden, &model)
    });
}

/// The same weights under the other version of GPTQ: every zero point is off by one.
#[test]
fn a_wrong_zero_point_is_seen() {
    let golden = golden("gptq-act-order-dynamic");
    let folder = folder().join(&golden.name);
    let config = fs::read_to_string(folder.join("config.json")).expect("a configuration");
    for (format, agrees) in [("gptq", true), ("gptq_v2", false)] {
        let changed = config.replace(r#""checkpoint_format": "gptq""#, &format!(r#""checkpoint_format": "{format}""#));
        let weights = Safetensors::open(&folder).expect("weights");
        let model = OpenModel::from_config(&changed, Box::new(weights)).expect("a model");
        assert_eq!(check(&golden, &model).is_ok(), agrees, "{format}");
    }
}
