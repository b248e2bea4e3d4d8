//! models and data sets of the Hugging Face Hub.
