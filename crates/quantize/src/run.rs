//! The whole run, layer by layer: collect inputs, quantize, pass on, and run the quantized layer
//! for the next one's input.
//!
//! At any time memory holds one layer, original or quantized, the sums of its inputs, and the
//! hidden states of the calibration text.

use std::collections::HashMap;
use std::sync::Arc;

use folio_device::cpu::{Cpu, CpuConfig};
use folio_formats::WeightSource;
use folio_model::{Decoder, LayerSites, OpenModel, Stage};

use crate::calibrate::Calibration;
use crate::collect::Collect;
use crate::gram::{self, Gram};
use crate::layer::{self, Coded, Coder};
use crate::overlay::{Overlay, Stored};
use crate::{Error, Finished, Hessian, Method, Options, Plain, Progress, Result, Sink, Target, awq};

/// Quantizes `model` into `sink`.
pub fn run(model: OpenModel, options: &Options, sink: &mut dyn Sink, progress: &mut dyn FnMut(Progress)) -> Result<()> {
    check(&model, options)?;
    let OpenModel { spec, weights, names, .. } = model;
    let source: Arc<dyn WeightSource> = weights.into();
    let plain = Overlay { base: source.clone(), replaced: Arc::default() };
    let model = OpenModel { spec, weights: Box::new(plain), names, packing: None, at_load: None, gguf: None };
    let calibration = match options.needs_calibration() {
        true => Some(Calibration::new(&model, &options.calibration)?),
        false => None,
    };
    let mut run = Run { model, source, options, calibration, sink, progress };
    run.outside()?;
    for layer in 0..run.model.spec.layers.len() {
        run.layer(layer)?;
    }
    run.head()?;
    Ok(run.source.check()?)
}

fn check(model: &OpenModel, options: &Options) -> Result<()> {
    if model.packing.is_some() {
        let what = format!("this {} model", model.spec.family);
        return Err(Error::Unsupported { what, why: "its linears are packed already" });
    }
    if options.needs_calibration() && options.calibration.is_empty() {
        let what = match options.method {
            Method::Gptq => "gptq",
            Method::Awq => "awq",
            Method::Rtn => "llm-int8",
        };
        return Err(Error::NoCalibration { what });
    }
    if options.method == Method::Awq && options.target == Target::LlmInt8 {
        return Err(Error::Unsupported {
            what: "llm-int8 by awq".to_owned(),
            why: "it keeps large columns as they are",
        });
    }
    Ok(())
}

struct Run<'a> {
    model: OpenModel,
    source: Arc<dyn WeightSource>,
    options: &'a Options,
    calibration: Option<Calibration>,
    sink: &'a mut dyn Sink,
    progress: &'a mut dyn FnMut(Progress),
}

/// Approximate shares of a layer's time: after collecting, and after quantizing; the rest is
/// running the quantized layer.
const COLLECTED: f32 = 0.45;
const CODED: f32 = 0.85;

impl Run<'_> {
    fn report(&mut self, layer: usize, what: &'static str, share: f32) {
        let layers = self.model.spec.layers.len();
        let done = ((layer as f32 + share) / layers.max(1) as f32).min(1.0);
        (self.progress)(Progress { layer, layers, what, done });
    }

    /// Passes on all tensors outside the layers unchanged; the output matrix comes last if it is
    /// quantized.
    fn outside(&mut self) -> Result<()> {
        self.report(0, "embeddings", 0.0);
        let head = self.coded_head().map(|head| layer::weight_name(&head));
        let layers = self.model.spec.layers.len();
        let prefixes: Vec<String> = (0..layers).map(|layer| self.model.names.layer_prefix(layer)).collect();
        let source = self.source.clone();
        for name in source.names() {
            let in_layer = prefixes.iter().any(|prefix| name.starts_with(prefix.as_str()));
            if !in_layer && head.as_deref() != Some(name) {
                self.pass_on(name)?;
            }
        }
        Ok(())
    }

    fn coded_head(&self) -> Option<folio_model::StoredLinear> {
        self.model.head().filter(|head| !self.options.keeps(&head.stem))
    }

    /// Passes on a tensor of the source unchanged.
    fn pass_on(&mut self, name: &str) -> Result<()> {
        let view = self.source.require(name)?;
        let plain = Plain { format: view.format, shape: view.shape.clone(), bytes: view.bytes.into() };
        self.sink.tensor(name, Finished::Plain(plain))?;
        self.source.release(name);
        Ok(())
    }

    fn layer(&mut self, layer: usize) -> Result<()> {
        let sites = self.model.sites(layer)?;
        let hessians = self.collect(layer, &sites)?;
        let coded = self.code(layer, &sites, hessians)?;
        self.advance(layer, &coded)?;
        self.hand_over(layer, coded)
    }

    /// Runs the original layer and sums the inputs of its linears.
    fn collect(&mut self, layer: usize, sites: &LayerSites) -> Result<Vec<Hessian>> {
        if self.calibration.is_none() {
            return Ok(Vec::new());
        }
        self.report(layer, "reading inputs", 0.0);
        let backend = Collect::new(self.backend()?, sites);
        let Some(calibration) = &mut self.calibration else { return Ok(Vec::new()) };
        let stage = Stage::layers(layer..layer + 1);
        let mut decoder = Decoder::load_stage(backend, &self.model, &stage, calibration.limits(), &mut |_| {})?;
        let (progress, layers) = (&mut *self.progress, self.model.spec.layers.len());
        calibration.run(&mut decoder, false, &mut |share| {
            let done = (layer as f32 + COLLECTED * share) / layers as f32;
            progress(Progress { layer, layers, what: "reading inputs", done });
        })?;
        let mut hessians = decoder.backend_mut().finish()?;
        layer::fill_in_experts(sites, &mut hessians);
        Ok(hessians)
    }

    fn code(&mut self, layer: usize, sites: &LayerSites, hessians: Vec<Hessian>) -> Result<Coded> {
        let (first, share) = match self.calibration {
            Some(_) => (COLLECTED, CODED - COLLECTED),
            None => (0.0, 1.0),
        };
        let (layers, backend) = (self.model.spec.layers.len(), self.backend()?);
        let progress = &mut *self.progress;
        let mut step = |part: f32| {
            let done = (layer as f32 + first + share * part) / layers as f32;
            progress(Progress { layer, layers, what: "choosing codes", done });
        };
        match self.options.method {
            Method::Awq => awq::code(&self.model, layer, sites, hessians, self.options, backend, &mut step),
            Method::Rtn | Method::Gptq => layer::code(&self.model, sites, &hessians, self.options, &mut step),
        }
    }

    /// Runs the quantized layer: the next one is calibrated on its real inputs.
    fn advance(&mut self, layer: usize, coded: &Coded) -> Result<()> {
        let last = layer + 1 == self.model.spec.layers.len();
        if self.calibration.is_none() || (last && self.coded_head().is_none()) {
            return Ok(());
        }
        self.report(layer, "running the layer", CODED);
        let replaced: HashMap<String, Stored> = coded.decoded()?;
        let weights = Overlay { base: self.source.clone(), replaced: Arc::new(replaced) };
        let model = self.model.with_weights(Box::new(weights));
        let backend = self.backend()?;
        let Some(calibration) = &mut self.calibration else { return Ok(()) };
        let stage = Stage::layers(layer..layer + 1);
        let mut decoder = Decoder::load_stage(backend, &model, &stage, calibration.limits(), &mut |_| {})?;
        calibration.run(&mut decoder, true, &mut |_| {})
    }

    /// Passes on the layer's tensors, in the order of the source.
    fn hand_over(&mut self, layer: usize, coded: Coded) -> Result<()> {
        let prefix = self.model.names.layer_prefix(layer);
        let source = self.source.clone();
        for name in source.names().into_iter().filter(|name| name.starts_with(&prefix)) {
            if let Some(quantized) = coded.quantized.get(name) {
                self.sink.tensor(name, Finished::Quantized(quantized))?;
            } else if let Some(Stored { format, shape, bytes }) = coded.changed.get(name) {
                let plain = Plain { format: *format, shape: shape.clone(), bytes: bytes.into() };
                self.sink.tensor(name, Finished::Plain(plain))?;
            } else {
                self.pass_on(name)?;
            }
        }
        Ok(())
    }

    /// Quantizes the output matrix, if that is requested.
    fn head(&mut self) -> Result<()> {
        let layers = self.model.spec.layers.len();
        if let Some(head) = self.coded_head() {
            self.report(layers, "output matrix", 0.0);
            let name = layer::weight_name(&head);
            self.options.target.check(&name, head.cols)?;
            let hessian = self.head_inputs()?;
            let coder = Coder::new(self.options, hessian.as_ref());
            let coded = coder.code(layer::read(&self.model, &head)?, head.cols);
            self.sink.tensor(&name, Finished::Quantized(&coded))?;
        }
        self.report(layers, "done", 0.0);
        Ok(())
    }

    fn head_inputs(&self) -> Result<Option<Hessian>> {
        let Some(calibration) = &self.calibration else { return Ok(None) };
        let spec = &self.model.spec;
        let [_, norm] = self.model.embedding_and_last_norm();
        let mut norm = layer::read_view(&self.source.require(&norm)?)?;
        norm.iter_mut().for_each(|value| *value += spec.norm_offset);
        let mut backend = self.backend()?;
        let (mut gram, mut hessian) = (Gram::default(), Hessian::new(spec.hidden));
        for rows in calibration.normed(&norm, spec.norm_eps) {
            gram.add(&mut backend, &mut hessian, &rows)?;
        }
        gram::finish(&mut hessian);
        Ok(Some(hessian))
    }

    fn backend(&self) -> Result<Cpu> {
        Ok(Cpu::new(CpuConfig { threads: self.options.threads, isa: None })?)
    }
}

#[cfg(test)]
mod tests;
