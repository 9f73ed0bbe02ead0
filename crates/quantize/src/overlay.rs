//! Weights with some of them replaced: a quantized layer can be run without a second copy of the
//! rest.

use std::collections::HashMap;
use std::sync::Arc;

use folio_formats::{Format, TensorView, WeightSource};

/// A replaced tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stored {
    pub format: Format,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

pub(crate) struct Overlay {
    pub base: Arc<dyn WeightSource>,
    pub replaced: Arc<HashMap<String, Stored>>,
}

impl WeightSource for Overlay {
    fn names(&self) -> Vec<&str> {
        self.base.names()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        match self.replaced.get_key_value(name) {
            Some((name, Stored { format, shape, bytes })) => {
                Some(TensorView { name, format: *format, shape: shape.clone(), bytes })
            }
            None => self.base.tensor(name),
        }
    }

    fn require(&self, name: &str) -> folio_formats::Result<TensorView<'_>> {
        match self.tensor(name) {
            Some(view) => Ok(view),
            None => self.base.require(name),
        }
    }

    fn release(&self, name: &str) {
        self.base.release(name);
    }

    fn check(&self) -> folio_formats::Result<()> {
        self.base.check()
    }
}
