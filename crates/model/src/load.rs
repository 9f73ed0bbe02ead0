//! Finds tensors, checks their shapes and hands them out as row lists. Packed tensors are released
//! at once, so that loading never holds two copies of more than one matrix.

use std::cell::RefCell;

use folio_formats::packing::{Packed, Packing};
use folio_formats::{Format, Matrix, TensorView, WeightSource};

use crate::at_load::Encoder;
use crate::{Error, LayerSpec, Names, NormPlacement, OpenModel, Result, names::Part};

/// Progress of loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    pub bytes_done: u64,
    pub bytes_total: u64,
}

pub(crate) struct Loader<'a> {
    source: &'a dyn WeightSource,
    names: &'a Names,
    packing: Option<&'a dyn Packing>,
    encoder: Option<Encoder>,
    family: &'static str,
    norm_offset: f32,
    /// Read since the last [`Loader::settle`], with their bytes.
    pending: RefCell<Vec<(String, u64)>>,
    progress: LoadProgress,
}

/// Role of a tensor: its layer and that layer's norms. `Place::OUTSIDE` for embedding, head and the
/// last norm.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub layer: usize,
    norms: NormPlacement,
}

impl Place {
    pub const OUTSIDE: Self = Self { layer: 0, norms: NormPlacement::PRE };

    pub fn of(layer: usize, spec: &LayerSpec) -> Self {
        Self { layer, norms: spec.norms }
    }
}

impl<'a> Loader<'a> {
    /// `sizes_only`: the values of matrices will not be read.
    pub fn new(model: &'a OpenModel, sizes_only: bool) -> Self {
        let source: &dyn WeightSource = &*model.weights;
        let sizes = source.names().into_iter().filter_map(|name| source.tensor(name)).map(|t| t.bytes.len() as u64);
        Self {
            source,
            names: &model.names,
            packing: model.packing.as_deref(),
            encoder: model.at_load.map(|kind| Encoder { kind, sizes_only }),
            family: model.spec.family,
            norm_offset: model.spec.norm_offset,
            pending: RefCell::default(),
            progress: LoadProgress { bytes_done: 0, bytes_total: sizes.sum() },
        }
    }

    pub fn names(&self) -> &'a Names {
        self.names
    }

    pub fn family(&self) -> &'static str {
        self.family
    }

    /// All tensors read so far have been copied: frees their pages.
    pub fn settle(&mut self, report: &mut dyn FnMut(LoadProgress)) {
        for (name, bytes) in self.pending.get_mut().drain(..) {
            self.source.release(&name);
            self.progress.bytes_done += bytes;
        }
        report(self.progress);
    }

    /// The tensor of that exact name, if it exists; noted for release.
    pub fn raw(&self, name: &str) -> Option<TensorView<'a>> {
        let view = self.source.tensor(name)?;
        self.pending.borrow_mut().push((name.to_owned(), view.bytes.len() as u64));
        Some(view)
    }

    pub fn exists(&self, name: &str) -> bool {
        self.source.contains(name)
    }

    /// The tensor of that name, of that shape.
    pub fn named(&self, name: &str, shape: &[usize]) -> Result<TensorView<'a>> {
        let Some(view) = self.raw(name) else {
            // A tensor of an unsupported type exists, and its own error says more.
            return match self.source.require(name) {
                Err(error @ folio_formats::Error::Unsupported { .. }) => Err(error.into()),
                _ => Err(self.missing(name, shape)),
            };
        };
        self.check_shape(&view, shape)?;
        Ok(view)
    }

    fn missing(&self, name: &str, shape: &[usize]) -> Error {
        Error::MissingTensor { name: name.to_owned(), family: self.family, expected: shape.to_vec() }
    }

    fn check_shape(&self, view: &TensorView<'_>, shape: &[usize]) -> Result<()> {
        if view.shape == shape {
            return Ok(());
        }
        let name = view.name.to_owned();
        Err(Error::TensorShape { name, family: self.family, expected: shape.to_vec(), found: view.shape.clone() })
    }

    fn values(&self, view: &TensorView<'a>) -> Result<Vec<f32>> {
        self.check_float(view)?;
        Ok(view.to_f32()?)
    }

    /// Refuses formats without usable numbers: index and packed formats, and eight-bit floats
    /// without their scales.
    pub fn check_float(&self, view: &TensorView<'_>) -> Result<()> {
        let expected = match view.format {
            Format::I8 | Format::U8 | Format::I16 | Format::I32 | Format::I64 => "a floating-point or quantized format",
            Format::F8_E4M3 | Format::F8_E5M2 | Format::F8_E8M0 => "a format that needs no scales beside it",
            _ => return Ok(()),
        };
        let (name, found) = (view.name.to_owned(), format!("{:?}", view.format));
        Err(Error::TensorFormat { name, family: self.family, expected, found })
    }

    pub fn matrix_of(&self, view: &TensorView<'a>) -> Result<Matrix<'a>> {
        self.check_float(view)?;
        Ok(view.matrix()?)
    }

    /// The first of the part's names that exists, or the usual one.
    fn first_name(&self, part: Part, place: Place, suffix: &str, exists: impl Fn(&str) -> bool) -> String {
        let names = self.names.candidates(part, place.layer, place.norms);
        let mut full = names.iter().map(|name| format!("{name}{suffix}"));
        let usual = full.next().unwrap_or_default();
        if exists(&usual) {
            return usual;
        }
        full.find(|name| exists(name)).unwrap_or(usual)
    }

    /// The name the part has in this source: the first that exists, or the usual one.
    pub fn name_of(&self, part: Part, place: Place, suffix: &str) -> String {
        self.first_name(part, place, suffix, |name| self.exists(name))
    }

    /// The name of a matrix in this source, without a suffix: it may be packed.
    pub fn stem_of(&self, part: Part, place: Place) -> String {
        self.first_name(part, place, "", |stem| self.has_matrix(stem))
    }

    /// Whether the layer of that name, without a suffix, has a weight, plain or packed.
    pub fn has_matrix(&self, stem: &str) -> bool {
        self.exists(&format!("{stem}.weight")) || self.packing.is_some_and(|packing| packing.holds(self.source, stem))
    }

    pub fn has(&self, part: Part, place: Place) -> bool {
        self.has_matrix(&self.stem_of(part, place))
    }

    pub fn matrix(&self, part: Part, place: Place, rows: usize, cols: usize) -> Result<Matrix<'a>> {
        let matrix = self.matrix_named(&self.stem_of(part, place), rows, cols)?;
        if part.is_encoded_at_load() { self.at_load(matrix) } else { Ok(matrix) }
    }

    /// A layer's matrix in the requested form.
    pub fn at_load(&self, matrix: Matrix<'a>) -> Result<Matrix<'a>> {
        match &self.encoder {
            Some(encoder) => encoder.encode(matrix),
            None => Ok(matrix),
        }
    }

    /// The weight of the layer of that name, without a suffix: unpacked, or in its stored form.
    pub fn matrix_named(&self, stem: &str, rows: usize, cols: usize) -> Result<Matrix<'a>> {
        match self.packing.filter(|packing| packing.holds(self.source, stem)) {
            Some(packing) => {
                let Packed { matrix, tensors } = packing.matrix(self.source, stem, rows, cols)?;
                let bytes = |name: &String| self.source.tensor(name).map_or(0, |view| view.bytes.len() as u64);
                let read = tensors.into_iter().map(|name| (bytes(&name), name)).map(|(bytes, name)| (name, bytes));
                self.pending.borrow_mut().extend(read);
                Ok(matrix)
            }
            None => self.matrix_of(&self.named(&format!("{stem}.weight"), &[rows, cols])?),
        }
    }

    pub fn bias(&self, part: Part, place: Place, len: usize) -> Result<Vec<f32>> {
        self.values(&self.named(&self.name_of(part, place, ".bias"), &[len])?)
    }

    /// A norm's weights, offset added.
    pub fn norm(&self, part: Part, place: Place, len: usize) -> Result<Vec<f32>> {
        let mut values = self.values(&self.named(&self.name_of(part, place, ".weight"), &[len])?)?;
        values.iter_mut().for_each(|value| *value += self.norm_offset);
        Ok(values)
    }

    /// A vector that some checkpoints store without `.weight`.
    pub fn plain_vector(&self, part: Part, place: Place, len: usize) -> Result<Vec<f32>> {
        let bare = self.name_of(part, place, "");
        let suffixes = [".weight", ".bias"].map(|suffix| self.name_of(part, place, suffix));
        let name = suffixes.into_iter().find(|name| self.exists(name)).unwrap_or(bare);
        self.values(&self.named(&name, &[len])?)
    }

    /// Values of an expert tensor or bias by exact name.
    pub fn values_named(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        self.values(&self.named(name, shape)?)
    }
}
