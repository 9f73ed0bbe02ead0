//! Models for tests: weights in memory, made for whatever the loader asks for.

use std::collections::BTreeMap;

use folio_device::cpu::CpuConfig;
use folio_formats::{Format, TensorView, WeightSource};
use folio_model::{Error, OpenModel};

use super::super::weights::WeightBytes;
use crate::assets::Assets;
use crate::target::Target;

/// How the invented matrices are stored; vectors are always f32.
#[derive(Clone, Copy, Debug)]
pub enum Stored {
    F32,
    F16,
    BF16,
    /// Key matrices in f16, all else in bf16: fused with others they are widened.
    Mixed,
}

#[derive(Clone, Default)]
struct Memory(BTreeMap<String, (Format, Vec<usize>, Vec<u8>)>);

impl WeightSource for Memory {
    fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, (format, shape, bytes)) = self.0.get_key_value(name)?;
        Some(TensorView { name, format: *format, shape: shape.clone(), bytes })
    }

    fn release(&self, _: &str) {}
}

/// Missing tensors are made, all zeros, until none is missing.
pub fn invent(name: &str, config: &str, stored: Stored) -> Assets {
    let mut weights = Memory::default();
    loop {
        let model = OpenModel::from_config(config, Box::new(weights.clone())).expect("the configuration is sound");
        let error = match WeightBytes::of(&model, &Target::Cpu(CpuConfig { threads: 1, isa: None })) {
            Ok(_) => return Assets::bare(name, model),
            Err(error) => error,
        };
        let Some(Error::MissingTensor { name, expected, .. }) = error.downcast_ref() else {
            panic!("{config}: {error:#}");
        };
        let format = match (stored, expected.len()) {
            (_, 1) | (Stored::F32, _) => Format::F32,
            (Stored::F16, _) => Format::F16,
            (Stored::Mixed, _) if name.contains("k_proj") => Format::F16,
            (Stored::BF16 | Stored::Mixed, _) => Format::BF16,
        };
        let values = expected.iter().product::<usize>() as u64;
        let bytes = vec![0; format.bytes_for(values).expect("a plain format") as usize];
        weights.0.insert(name.clone(), (format, expected.clone(), bytes));
    }
}
