"""Training in little memory, a switch each: weights as int4, a layer at a time, and logits only where they are needed.

After arXiv 2606.19528. What is exact (layers one by one, logits where labels are) has the gradients of plain autograd;
int4 weights and a softmax over near tokens change them a little.
"""
